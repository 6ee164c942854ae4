#include <openssl/err.h>
#include <openssl/x509v3.h>

#include <cerrno>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "transports/tls/tls_context.h"

namespace telegrad {
namespace {

// Both with SHA-256, the hash of the pre-shared key. The first is fast where the processor has AES.
constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr const char* kGroups = "X25519:P-256";
constexpr unsigned char kSuite[] = {0x13, 0x01};  // of the key's session: any of the two, as their hash is the same
constexpr std::string_view kKeyId = "telegrad";   // fixed, so that it tells others nothing
constexpr unsigned char kContext[] = {'t', 'g'};  // OpenSSL wants sessions to name one
constexpr std::size_t kReadBuffer = 64 << 10;     // encrypted bytes read with one system call
constexpr int kMaxChain = 4;

[[noreturn]] void fail(const std::string& what) {
  const std::string why = openssl_errors();
  throw std::runtime_error(what + (why.empty() ? "" : ": " + why));
}

}  // namespace

std::string openssl_errors() {
  std::string all;
  while (const unsigned long code = ERR_get_error()) {
    const char* const known = ERR_reason_error_string(code);
    const std::string reason = ERR_SYSTEM_ERROR(code) ? std::generic_category().message(ERR_GET_REASON(code))
                               : known                ? known
                                                      : "error " + std::to_string(code);
    if (reason != "system lib" && all.find(reason) == std::string::npos) all += (all.empty() ? "" : ", ") + reason;
  }
  return all;
}

TlsContext::TlsContext(const TlsSettings& settings) : settings_(settings), context_(SSL_CTX_new(TLS_method())) {
  SSL_CTX* const c = context_.get();
  if (!c || SSL_CTX_set_min_proto_version(c, TLS1_3_VERSION) != 1 || SSL_CTX_set_ciphersuites(c, kCiphers) != 1 ||
      SSL_CTX_set1_groups_list(c, kGroups) != 1)
    fail("OpenSSL has no TLS 1.3");
  SSL_CTX_set_options(c, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  SSL_CTX_set_session_id_context(c, kContext, sizeof kContext);
  SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(c, 0);  // each connection authenticates on its own
  SSL_CTX_set_read_ahead(c, 1);
  SSL_CTX_set_default_read_buffer_len(c, kReadBuffer);
  if (has_certificates()) {
    use_certificates();
  } else {
    use_key();
  }
}

void TlsContext::use_key() {
  if (settings_.key.size() != 32) fail("the key of encrypted connections has to have 32 bytes");
  SSL_CTX_set_psk_use_session_callback(context_.get(), offer_key);
  SSL_CTX_set_psk_find_session_callback(context_.get(), find_key);
  // Without a certificate, an acceptor can accept only the key. This is for initiators.
  SSL_CTX_set_verify(context_.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
}

void TlsContext::use_certificates() {
  SSL_CTX* const c = context_.get();
  if (SSL_CTX_use_certificate_chain_file(c, settings_.certificate.c_str()) != 1)
    fail("cannot read the certificate " + settings_.certificate + " (option tls_cert)");
  if (SSL_CTX_use_PrivateKey_file(c, settings_.private_key.c_str(), SSL_FILETYPE_PEM) != 1)
    fail("cannot read the private key " + settings_.private_key + " (option tls_key), or it is not the certificate's");
  if (SSL_CTX_check_private_key(c) != 1)
    fail("the private key " + settings_.private_key + " (option tls_key) does not belong to the certificate " +
         settings_.certificate);
  if (SSL_CTX_load_verify_file(c, settings_.authority.c_str()) != 1)
    fail("cannot read the certificates of the authority " + settings_.authority + " (option tls_ca)");
  SSL_CTX_set_verify_depth(c, kMaxChain);
  SSL_CTX_set_verify(c, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_cert_verify_callback(c, verify, nullptr);
  // A worker is both ends of connections: its certificate needs no particular purpose.
  X509_VERIFY_PARAM_set_purpose(SSL_CTX_get0_param(c), X509_PURPOSE_ANY);
}

/// Checks the certificate of the other end. An acceptor gives any failure the same alert.
int TlsContext::verify(X509_STORE_CTX* store, void*) {
  if (X509_verify_cert(store) == 1) return 1;
  auto* const ssl = static_cast<SSL*>(X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx()));
  auto* const data = static_cast<TlsCallbackData*>(SSL_get_app_data(ssl));
  data->verify_error = X509_STORE_CTX_get_error(store);
  if (!data->initiator) X509_STORE_CTX_set_error(store, X509_V_ERR_APPLICATION_VERIFICATION);
  return 0;
}

std::unique_ptr<SSL, SslDeleter> TlsContext::make_connection(TlsCallbackData& data) {
  std::unique_ptr<SSL, SslDeleter> ssl(SSL_new(data.context->context_.get()));
  if (!ssl) throw std::system_error(ENOMEM, std::generic_category(), "OpenSSL cannot make a connection");
  SSL_set_app_data(ssl.get(), &data);
  if (data.initiator) {
    SSL_set_connect_state(ssl.get());
  } else {
    SSL_set_accept_state(ssl.get());
  }
  return ssl;
}

/// Returns the pre-shared key in the form that OpenSSL takes.
std::unique_ptr<SSL_SESSION, SslDeleter> TlsContext::session_of(SSL* ssl) {
  const auto& key = static_cast<const TlsCallbackData*>(SSL_get_app_data(ssl))->context->settings_.key;
  std::unique_ptr<SSL_SESSION, SslDeleter> session(SSL_SESSION_new());
  const SSL_CIPHER* const cipher = SSL_CIPHER_find(ssl, kSuite);
  const bool good =
      session && cipher &&
      SSL_SESSION_set1_master_key(session.get(), reinterpret_cast<const unsigned char*>(key.data()), key.size()) == 1 &&
      SSL_SESSION_set1_id_context(session.get(), kContext, sizeof kContext) == 1 &&
      SSL_SESSION_set_cipher(session.get(), cipher) == 1 &&
      SSL_SESSION_set_protocol_version(session.get(), TLS1_3_VERSION) == 1;
  return good ? std::move(session) : nullptr;
}

int TlsContext::offer_key(SSL* ssl, const EVP_MD* hash, const unsigned char** id, std::size_t* size,
                          SSL_SESSION** session) {
  *id = nullptr;
  *size = 0;
  *session = nullptr;
  if (hash && EVP_MD_get_type(hash) != NID_sha256) return 0;
  *session = session_of(ssl).release();
  if (!*session) return 0;
  *id = reinterpret_cast<const unsigned char*>(kKeyId.data());
  *size = kKeyId.size();
  return 1;
}

int TlsContext::find_key(SSL* ssl, const unsigned char* id, std::size_t size, SSL_SESSION** session) {
  *session = nullptr;
  if (std::string_view(reinterpret_cast<const char*>(id), size) != kKeyId) return 1;  // no such key
  *session = session_of(ssl).release();
  return *session != nullptr;
}

}  // namespace telegrad
