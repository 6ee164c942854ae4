#!/usr/bin/env bash
# Builds the extension module with the address and undefined-behavior sanitizers, and runs the tests of the codec and of
# the bindings with it: test_bindings_sanitized.sh VENV BUILD_FOLDER [ARGUMENTS OF PYTEST...].
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/$1/bin
folder=$2
shift 2
export PATH=$bin:$PATH
. tools/built_package.sh
build_package "$folder" -DTELEGRAD_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo

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
export PYTHONMALLOC=malloc
LD_PRELOAD=$preload check_package
LD_PRELOAD=$preload python -m pytest -q -m "not slow" -p no:faulthandler --timeout 600 "$@" tests/serialize tests/core
