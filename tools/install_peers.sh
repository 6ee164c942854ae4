#!/usr/bin/env bash
# Installs the competitors of the bench, one at a time: install_peers.sh VENV. A failure does not affect the others;
# VENV/peers/NAME.log has the reason, which the bench shows.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
logs=$venv/peers
mkdir -p "$logs"

for peer in grpcio ray torchmonarch; do
  log=$logs/$peer.log
  [ -e "$log" ] && [ ! -s "$log" ] && continue
  echo "telegrad: installing $peer, to measure it as well"
  if "$venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt "$peer" >"$log.part" 2>&1; then
    : >"$log.part"
  fi
  mv "$log.part" "$log"
done
