#!/usr/bin/env bash
# Checks the thread-safety annotations of the core (csrc/base/thread_safety.h) with clang: check_locks.sh VENV.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

check() {
  "$venv/bin/clang-tidy" --quiet --config='{}' --checks='-*,clang-diagnostic-*' --warnings-as-errors='*' \
    --allow-no-checks "$@" -- -std=c++20 -Icsrc -Wno-everything -Wthread-safety 2>&1 |
    { grep -vE '^([0-9]+ warnings? generated\.|\[[0-9/]+\] Processing file .*|Suppressed .*)$' || true; }
}
export -f check
export venv

find csrc/core csrc/memory -name '*.cc' -print0 | xargs -0 -P 2 -n 4 bash -o pipefail -c 'check "$@"' check
