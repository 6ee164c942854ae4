#!/usr/bin/env bash
# Installs the headers of OpenSSL, with which the core is built, if the machine allows it. Without them it is built without
# secrets and encryption, and their tests are skipped.
set -euo pipefail

if [ -e /usr/include/openssl/ssl.h ] || { command -v pkg-config >/dev/null && pkg-config --atleast-version=3 libssl; }; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "telegrad: OpenSSL's headers are not installed, so the core is built without secrets and encryption. On Debian:" \
    "apt install libssl-dev" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get -qq update && apt-get -qq install -y --no-install-recommends libssl-dev; } >/dev/null 2>&1; then
  echo "telegrad: libssl-dev cannot be installed, so the core is built without secrets and encryption" >&2
fi
