#!/usr/bin/env bash
# Builds the extension module with the address and undefined-behavior sanitizers, and runs the tests of the codec and of
# the bindings with it: test_bindings_sanitized.sh VENV BUILD_FOLDER [ARGUMENTS OF PYTEST...].
# The module of the checkout does not change: the tests import a copy of the package in the build folder.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/$1/bin
folder=$2
shift 2
export PATH=$bin:$PATH
mkdir -p "$folder"

if command -v flock >/dev/null; then
  exec 9>"$folder/.lock"
  flock 9
fi

if [ ! -f "$folder/build.ninja" ]; then
  . tools/check_compiler.sh
  check_compiler
  cmake -S . -B "$folder" -G Ninja -DPython_EXECUTABLE="$bin/python" -DTELEGRAD_SANITIZE=address,undefined \
    -DTELEGRAD_WERROR=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
fi
cmake --build "$folder" | { grep -v 'no work to do' || true; }

package=$PWD/$folder/package
rm -rf "$package"
mkdir -p "$package"
cp -r src/telegrad "$package/"
rm -f "$package"/telegrad/_core.*.so
cp "$folder"/_core.*.so "$package/telegrad/"
# The environment's editable install would come before PYTHONPATH.
cat >"$package/sitecustomize.py" <<'PY'
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildInplaceFinder"]
PY

# Python is not built with the sanitizers, so their runtimes are preloaded. The address sanitizer wraps C++ exceptions,
# so the C++ library is preloaded too.
read -ra compiler <<<"${CXX:-g++}"
preload=
for library in libasan.so libubsan.so libstdc++.so; do
  preload+="${preload:+ }$("${compiler[@]}" -print-file-name=$library)"
done

# CPython keeps much of its memory until exit, so leak detection is off.
export ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1:handle_segv=0
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONPATH=$package PYTHONMALLOC=malloc
LD_PRELOAD=$preload python - <<'PY'
import telegrad._core

assert "/package/" in telegrad._core.__file__, telegrad._core.__file__
PY
LD_PRELOAD=$preload python -m pytest -q -m "not slow" -p no:faulthandler --timeout 600 "$@" tests/serialize tests/core
