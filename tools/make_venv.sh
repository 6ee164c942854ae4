#!/usr/bin/env bash
# Makes the development environment: make_venv.sh VENV. PYTHON in the environment names the interpreter to use.
# Reports in one line what the machine lacks. After a change of pyproject.toml it installs only new packages.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

die() {
  echo "telegrad: $*" >&2
  exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "needs Python 3.11 or later; found $("${PYTHON:-python3}" --version 2>&1 || true). Set PYTHON=/path/to/python3.11."
}

. tools/check_compiler.sh
check_compiler

if [ ! -x "$venv/bin/python" ] || ! new_enough "$venv/bin/python"; then
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "'$python' cannot make virtual environments. On Debian: apt install python3-venv"
  "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    die "'$python' has no Python.h, which the compiled core needs. On Debian: apt install python3-dev"
  echo "telegrad: making $venv (once; PyTorch is large)"
  "$python" -m venv --clear "$venv"
fi

install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt "$@"; }

install torch cmake nanobind ninja scikit-build-core
# Editable without CMake: changed and new Python sources take effect at once. tools/build_core.sh puts the compiled core
# next to them.
install --no-build-isolation -C wheel.cmake=false -C editable.mode=inplace -e '.[dev,docs,examples]'
