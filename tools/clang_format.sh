#!/usr/bin/env bash
# Runs the environment's clang-format over every C++ source: clang_format.sh VENV ARGUMENTS...
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
shift
find csrc bench \( -name '*.cc' -o -name '*.h' \) -print0 | xargs -0 "$venv/bin/clang-format" --style=file "$@"
