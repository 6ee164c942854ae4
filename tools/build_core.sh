#!/usr/bin/env bash
# Compiles changed sources of csrc and puts telegrad._core next to the Python sources: build_core.sh VENV BUILD_FOLDER.
# Takes a fraction of a second without changes.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/$1/bin
folder=$2
export PATH=$bin:$PATH
mkdir -p "$folder"

# Two builds in one folder would corrupt each other; the second waits.
if command -v flock >/dev/null; then
  exec 9>"$folder/.lock"
  flock 9
fi

. tools/check_compiler.sh
quietly() {
  "$@" >"$folder/log" 2>&1 && return
  check_compiler # it may have been removed after the folder was configured
  tail -n 60 "$folder/log" >&2
  exit 1
}

if [ ! -f "$folder/build.ninja" ]; then
  check_compiler
  quietly cmake -S . -B "$folder" -G Ninja -DPython_EXECUTABLE="$bin/python" -DTELEGRAD_WERROR=ON \
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
  grep '^telegrad:' "$folder/log" >&2 || true # what the core is built without
fi
quietly cmake --build "$folder"

for built in "$folder"/_core.*.so; do
  placed=src/telegrad/$(basename "$built")
  cmp -s "$built" "$placed" && continue
  # Renamed into place: a process that has mapped the old file keeps it.
  cp "$built" "$placed.new.$$"
  mv "$placed.new.$$" "$placed"
  echo "telegrad: built $placed"
done
