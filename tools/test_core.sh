#!/usr/bin/env bash
# Builds the core's C++ tests with a sanitizer and runs them: test_core.sh VENV BUILD_FOLDER SANITIZERS.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/$1/bin
folder=$2
sanitizers=$3
export PATH=$bin:$PATH
mkdir -p "$folder"

if command -v flock >/dev/null; then
  exec 9>"$folder/.lock"
  flock 9
fi

# -O1 -g1: compiles in half the time of RelWithDebInfo, and stacks have lines.
if [ ! -f "$folder/build.ninja" ]; then
  . tools/check_compiler.sh
  check_compiler
  cmake -S . -B "$folder" -G Ninja -DTELEGRAD_BUILD_PYTHON=OFF -DTELEGRAD_BUILD_TESTS=ON \
    -DTELEGRAD_SANITIZE="$sanitizers" -DTELEGRAD_WERROR=ON -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_CXX_FLAGS="${CXXFLAGS:-} -O1 -g1" \
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
fi
cmake --build "$folder" | { grep -v 'no work to do' || true; }

export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:die_after_fork=0 # some tests fork

if [ "$sanitizers" = thread ]; then
  export TELEGRAD_SLOW_TESTS=1 # the thread sanitizer is for `make test-slow`
fi

# The thread sanitizer of older compilers fails with the address randomization of newer kernels.
runner=()
if [ "$sanitizers" = thread ] && setarch -R true 2>/dev/null; then
  runner=(setarch -R)
fi
"${runner[@]}" ctest --test-dir "$folder" --output-on-failure --no-tests=error -j 2
