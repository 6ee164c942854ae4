#!/usr/bin/env bash
# Installs etcd, for the tests of groups on etcd (tests/groups/test_etcd.py), if the machine allows it. Without etcd these
# tests are skipped.
set -euo pipefail

if command -v etcd >/dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "telegrad: etcd is not installed, so its tests are skipped. On Debian: apt install etcd-server" >&2
  exit 0
fi
# No service: the tests start etcd on ports of their own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
if ! { apt-get -qq update && apt-get -qq install -y --no-install-recommends etcd-server; } >/dev/null 2>&1; then
  echo "telegrad: etcd cannot be installed, so its tests are skipped" >&2
fi
