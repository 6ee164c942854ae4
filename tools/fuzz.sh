#!/usr/bin/env bash
# Builds the fuzzers of the core (csrc/fuzz) with clang and runs them: fuzz.sh VENV BUILD_FOLDER SECONDS [TARGETS...].
# Each target runs for SECONDS, from the inputs in csrc/fuzz/corpus and those found before. Afterwards fuzz.json in the
# build folder has the number of inputs. A crash is kept in the build folder, and its command is printed.
#   MERGE=1   add the inputs that reach new code to csrc/fuzz/corpus, the smallest ones, at most 1 KiB each
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
bin=$PWD/$1/bin
folder=$2
seconds=$3
shift 3
export PATH=$bin:$PATH
mkdir -p "$folder"

if command -v flock >/dev/null; then
  exec 9>"$folder/.lock"
  flock 9
fi

tools/install_clang.sh
. tools/find_fuzzing_clang.sh
compiler=$(find_fuzzing_clang)
if [ ! -f "$folder/build.ninja" ]; then
  cmake -S . -B "$folder" -G Ninja -DTELEGRAD_BUILD_PYTHON=OFF -DTELEGRAD_BUILD_FUZZERS=ON \
    -DTELEGRAD_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER="$compiler" \
    -DPython_EXECUTABLE="$bin/python" >/dev/null
fi
cmake --build "$folder" | { grep -v 'no work to do' || true; }

targets=("$@")
if [ ${#targets[@]} = 0 ]; then
  for program in "$folder"/*_fuzz; do
    targets+=("$(basename "$program" _fuzz)")
  done
fi
export UBSAN_OPTIONS=print_stacktrace=1
failed=0
for target in "${targets[@]}"; do
  leaks=1
  if grep -qs "interpreter.h" "csrc/fuzz/python/${target}_fuzz.cc"; then
    leaks=0 # CPython keeps much of its memory until exit
  fi
  found=$folder/found/$target
  kept=csrc/fuzz/corpus/$target
  mkdir -p "$found" "$kept"
  echo "fuzz: $target for $seconds s"
  if ! ASAN_OPTIONS=detect_leaks=$leaks:detect_stack_use_after_return=1 "$folder/${target}_fuzz" "$found" "$kept" \
    -max_total_time="$seconds" -timeout=20 -max_len=4096 -rss_limit_mb=3000 -artifact_prefix="$folder/$target-" \
    -print_final_stats=1 >"$folder/$target.log" 2>&1; then
    grep -E '^(this does not hold|SUMMARY|==[0-9]+==|Test unit written)' "$folder/$target.log" | tail -n 6 >&2 || true
    echo "fuzz: $target FAILED; its report is in $folder/$target.log" >&2
    failed=1
  fi
  if [ -n "${MERGE:-}" ]; then
    ASAN_OPTIONS=detect_leaks=0 "$folder/${target}_fuzz" -set_cover_merge=1 -use_counters=0 -max_len=1024 \
      "$kept" "$found" >"$folder/merge.log" 2>&1
  fi
done
"$bin/python" tools/fuzz_counts.py "$folder" "$seconds" "${targets[@]}"
exit $failed
