#!/usr/bin/env bash
# Makes an environment with the packages of tools/dependents.txt on top of the development environment, which does not
# change: make_dependents.sh VENV FOLDER.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 folder=$2

[ "$folder/.ready" -nt tools/dependents.txt ] && [ "$folder/.ready" -nt "$0" ] && exit
"$venv/bin/python" -m venv --clear --without-pip "$folder"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(realpath "$(site "$venv")")')" >"$(site "$folder")/development.pth"
echo "telegrad: installing packages that use torch.distributed.rpc, to run them"
if "$folder/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r tools/dependents.txt; then
  touch "$folder/.ready"
else
  echo "telegrad: they cannot be installed here, so tests/dependents skips them" >&2
fi
