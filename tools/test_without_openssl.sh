#!/usr/bin/env bash
# Builds the extension module without OpenSSL, and runs the tests of the core, among them those of what it refuses:
# test_without_openssl.sh VENV BUILD_FOLDER [ARGUMENTS OF PYTEST...].
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/$1/bin
folder=$2
shift 2
export PATH=$bin:$PATH
. tools/built_package.sh
build_package "$folder" -DTELEGRAD_OPENSSL=OFF
check_package
python -m pytest -q -m "not slow" --timeout 600 "$@" tests/core
