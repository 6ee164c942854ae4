// Encryption of the connections between hosts: what an engine gives to its transports. Implemented in transports/tls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace telegrad {

/// Keys and certificates, loaded once per engine. A transport that does not leave the host has no use for them.
class LinkSecurity {
 public:
  virtual ~LinkSecurity() = default;
};
using LinkSecurityPtr = std::shared_ptr<const LinkSecurity>;

struct TlsSettings {
  std::string key;          // 32 bytes; not used if there is a certificate
  std::string certificate;  // paths of PEM files
  std::string private_key;
  std::string authority;
  std::uint64_t key_update = std::uint64_t{64} << 30;  // bytes sent with one key, far below the limit of AES-GCM
};

/// Loads keys and certificates. Throws std::runtime_error that says what is wrong with which file.
LinkSecurityPtr make_tls(const TlsSettings& settings);

}  // namespace telegrad
