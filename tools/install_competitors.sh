#!/usr/bin/env bash
# Installs the competitors of the bench, one at a time: install_competitors.sh VENV. A failure does not
# affect the others; VENV/competitors/NAME.log has the reason, which the bench shows.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
logs=$venv/competitors
mkdir -p "$logs"

for competitor in grpcio ray torchmonarch; do
  log=$logs/$competitor.log
  [ -e "$log" ] && [ ! -s "$log" ] && continue
  echo "telegrad: installing $competitor, to measure it as well"
  if "$venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt "$competitor" >"$log.part" 2>&1; then
    : >"$log.part"
  fi
  mv "$log.part" "$log"
done
