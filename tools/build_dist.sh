#!/usr/bin/env bash
# Makes dist/*.tar.gz and, from it, one manylinux wheel for each Python of the machine. Then tests every wheel in an
# empty environment without a compiler: build_dist.sh VENV.
#
# auditwheel puts the machine's OpenSSL into the wheels, under names of their own.
#
# Pythons: VENV's, and each other CPython >= 3.11 with pip and Python.h that is on PATH, in pyenv or known to uv.
# PYTHONS="3.11 3.13" limits them. The wheel of VENV's Python runs a call between two processes with the third-party
# packages of VENV (PyTorch is large). The other wheels are installed and their core is loaded.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/$1
python=$venv/bin/python
try_wheel=$PWD/tools/try_wheel.py
export PATH=$venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_CONSTRAINT=$PWD/constraints.txt PIP_BUILD_CONSTRAINT=$PWD/constraints.txt

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
usable() {
  "$1" -I -c 'import os, pip, sys, sysconfig, venv
os.stat(sysconfig.get_path("include") + "/Python.h")
sys.exit(sys.version_info < (3, 11) or sys.implementation.name != "cpython" or sys.version_info.releaselevel != "final")' \
    2>/dev/null
}
candidates() {
  echo "$python"
  compgen -c python3. | grep -x 'python3\.[0-9]*' | sort -u | while read -r name; do command -v "$name"; done
  ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3 2>/dev/null || true
  if command -v uv >/dev/null; then uv python find --all-versions --offline 2>/dev/null || true; fi
}

rm -rf dist
"$python" -m build --sdist --outdir dist . >/dev/null
sdist=$(echo dist/*.tar.gz)

declare -A made
while read -r candidate; do
  usable "$candidate" || continue
  number=$(version "$candidate")
  [[ -z ${made[$number]:-} && " ${PYTHONS:-$number} " == *" $number "* ]] || continue
  made[$number]=$candidate
  # pip builds in its own environment, with the requirements of pyproject.toml, out of the tree: the sdist must do.
  (cd "$scratch" && "$candidate" -m pip wheel -q --no-deps --wheel-dir "raw-$number" "$OLDPWD/$sdist") ||
    { echo "telegrad: no wheel for Python $number ($candidate)" >&2; exit 1; }
  "$python" -m auditwheel repair --wheel-dir dist "$scratch/raw-$number"/*.whl >"$scratch/log" 2>&1 ||
    { cat "$scratch/log" >&2; exit 1; }
done < <(candidates)

for number in "${!made[@]}"; do
  wheel=$(echo "$PWD"/dist/*-cp"${number/./}"-*manylinux*.whl)
  empty=$scratch/empty-$number
  "${made[$number]}" -m venv --without-pip "$empty"
  site=$("$empty/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -m pip --python "$empty/bin/python" install -q --no-deps --no-index "$wheel"
  if [ "$number" = "$(version "$python")" ]; then
    # Searched after the environment's own packages, and without its .pth files: the checkout stays hidden.
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/lent.pth"
  fi
  mkdir "$scratch/no-tools-$number"
  (
    cd "$scratch"
    clean=(env -i HOME="$scratch" PATH="$scratch/no-tools-$number")
    "${clean[@]}" "$empty/bin/python" - <"$try_wheel"
    [ ! -e "$site/lent.pth" ] || "${clean[@]}" "$empty/bin/telegrad" demo --smoke | tail -n 1
  )
done
ls -l dist
