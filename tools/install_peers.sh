#!/usr/bin/env bash
# Installs what the bench measures us beside: install_peers.sh VENV. Each by itself, so that one that cannot be installed
# here leaves the others; why not stands in VENV/peers/NAME.log, and the bench shows it.
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
