#include <stdexcept>

#include "base/crypto.h"

namespace telegrad {

std::string openssl_version() { return {}; }

std::string hmac_sha256(std::string_view, std::string_view) { return {}; }

std::string derive_key(std::string_view, std::string_view, std::size_t) {
  throw std::runtime_error(std::string(kNoOpenSsl));
}

bool equal_in_constant_time(std::string_view a, std::string_view b) { return a == b; }

}  // namespace telegrad
