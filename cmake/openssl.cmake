# OpenSSL 3, the cryptography of the core: csrc/base/crypto.h and csrc/transports/tls. Linked dynamically, so that a
# machine's security updates reach it; auditwheel puts the libraries into a wheel (tools/build_dist.sh).
set(TELEGRAD_OPENSSL "AUTO" CACHE STRING "AUTO: with OpenSSL if it is installed; ON: it must be; OFF: without")
set(telegrad_openssl OFF)
if(TELEGRAD_OPENSSL)
  find_package(OpenSSL 3.0 QUIET COMPONENTS SSL Crypto)
  set(telegrad_openssl ${OpenSSL_FOUND})
endif()
if(NOT telegrad_openssl)
  if(TELEGRAD_OPENSSL STREQUAL "ON")
    telegrad_missing("OpenSSL 3.0 or later with its headers" "On Debian: apt install libssl-dev. Or set -DTELEGRAD_OPENSSL=OFF")
  endif()
  message(NOTICE "telegrad: built without OpenSSL: no secrets, no encryption, and groups of one user on one host only."
                 " For these: apt install libssl-dev, and build again.")
endif()

# Leaves out the sources that do not belong to this build: *_openssl.cc, or *_none.cc.
function(telegrad_filter_openssl list)
  set(other "_openssl\\.cc$")
  if(telegrad_openssl)
    set(other "_none\\.cc$")
  endif()
  list(FILTER ${list} EXCLUDE REGEX ${other})
  set(${list} ${${list}} PARENT_SCOPE)
endfunction()
