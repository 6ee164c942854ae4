// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): all the cryptography that the handshake needs, so that proving who
// one is takes no lock of the layer above.
#pragma once

#include <string>
#include <string_view>

namespace telegrad {

/// 32 bytes.
std::string sha256(std::string_view message);
std::string hmac_sha256(std::string_view key, std::string_view message);

}  // namespace telegrad
