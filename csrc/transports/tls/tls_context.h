// OpenSSL's settings for the connections of one engine.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "transports/tls/security.h"

namespace telegrad {

struct SslDeleter {
  void operator()(SSL* p) const { SSL_free(p); }
  void operator()(SSL_CTX* p) const { SSL_CTX_free(p); }
  void operator()(SSL_SESSION* p) const { SSL_SESSION_free(p); }
};

/// Returns the reasons of the last errors of OpenSSL on this thread, and forgets them.
std::string openssl_errors();

class TlsContext;

/// Data of a connection for OpenSSL's callbacks, and from them.
struct TlsCallbackData {
  const TlsContext* context;
  bool initiator;
  int verify_error = X509_V_OK;  // why the certificate of the other end was not accepted
};

class TlsContext final : public LinkSecurity {
 public:
  explicit TlsContext(const TlsSettings& settings);

  /// Makes the state of one connection. `data` must live as long as it. Throws std::system_error.
  static std::unique_ptr<SSL, SslDeleter> make_connection(TlsCallbackData& data);
  bool has_certificates() const { return !settings_.certificate.empty(); }
  std::uint64_t key_update() const { return settings_.key_update; }

 private:
  void use_key();
  void use_certificates();
  static int offer_key(SSL* ssl, const EVP_MD* hash, const unsigned char** id, std::size_t* size,
                       SSL_SESSION** session);
  static int find_key(SSL* ssl, const unsigned char* id, std::size_t size, SSL_SESSION** session);
  static int verify(X509_STORE_CTX* store, void*);
  static std::unique_ptr<SSL_SESSION, SslDeleter> session_of(SSL* ssl);

  const TlsSettings settings_;
  std::unique_ptr<SSL_CTX, SslDeleter> context_;
};

}  // namespace telegrad
