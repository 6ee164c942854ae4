// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), the only cryptography of the handshake. Implemented here so that
// authentication does not take the GIL.
#pragma once

#include <string>
#include <string_view>

namespace telegrad {

/// Returns the hash, 32 bytes.
std::string sha256(std::string_view message);
std::string hmac_sha256(std::string_view key, std::string_view message);

}  // namespace telegrad
