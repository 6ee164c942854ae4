#!/usr/bin/env bash
# Installs clang with libFuzzer, for the fuzzers (tools/fuzz.sh), if the machine allows it.
set -euo pipefail

. "$(dirname "$0")/find_fuzzing_clang.sh"
if find_fuzzing_clang >/dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "telegrad: the fuzzers need clang with libFuzzer. On Debian: apt install clang-14 libclang-rt-14-dev" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get -qq update && apt-get -qq install -y --no-install-recommends clang-14 libclang-rt-14-dev; } >/dev/null 2>&1; then
  echo "telegrad: clang-14 and libclang-rt-14-dev cannot be installed, so there are no fuzzers" >&2
  exit 1
fi
