// The cryptography of the core, all of it by OpenSSL. Without the GIL.
//
// A build without OpenSSL (cmake/openssl.cmake) has none. It cannot check a secret, so it accepts only processes that
// the kernel reports as its own user's on its own host (`Peers::rejection_reason`), and refuses secrets and encryption.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace telegrad {

inline constexpr std::string_view kNoOpenSsl =
    "this build of Telegrad has no OpenSSL, so it supports neither secrets nor encryption, and only groups of one user "
    "on one host. Install libssl-dev (Debian), openssl-devel (Fedora) or the like, and build it again";

/// Returns the version of OpenSSL in use; "" for a build without it.
std::string openssl_version();
inline bool has_crypto() { return !openssl_version().empty(); }

/// Returns HMAC-SHA256, 32 bytes; without OpenSSL "". Throws std::runtime_error.
std::string hmac_sha256(std::string_view key, std::string_view message);

/// Derives a key of `size` bytes with HKDF-SHA256 (RFC 5869); `purpose` separates keys of one secret. Throws
/// std::runtime_error, above all without OpenSSL.
std::string derive_key(std::string_view secret, std::string_view purpose, std::size_t size);

/// Compares without a difference in time that depends on the content.
bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace telegrad
