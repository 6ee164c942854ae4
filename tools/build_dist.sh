#!/usr/bin/env bash
# Makes dist/*.tar.gz and, out of that, dist/*.whl; then installs the wheel in an empty environment outside the tree and
# makes it answer: build_dist.sh VENV. The environment lends its third-party packages (PyTorch is large), nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/$1/bin/python

rm -rf dist
PIP_CONSTRAINT=$PWD/constraints.txt "$python" -m build --outdir dist . >/dev/null
wheel=$(echo "$PWD"/dist/*.whl)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
"$python" -m venv --without-pip try
try=$scratch/try/bin/python
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
"$python" -m pip install -q --disable-pip-version-check --no-deps --no-compile --target "$(site "$try")" "$wheel"
# Read after the environment's own packages, and without its .pth files: the checkout stays out of sight.
site "$python" >"$(site "$try")/lent.pth"
"$try" - <<'PY'
import importlib.metadata
import pathlib
import sys

import telegrad
import telegrad._core

for module in (telegrad, telegrad._core):
    assert pathlib.Path(module.__file__).is_relative_to(sys.prefix), module.__file__
assert importlib.metadata.version("telegrad") == telegrad.__version__
assert (pathlib.Path(telegrad.__file__).parent / "py.typed").exists()
print(f"telegrad {telegrad.__version__}: the wheel works in an empty environment")
PY
cd - >/dev/null
ls -l dist
