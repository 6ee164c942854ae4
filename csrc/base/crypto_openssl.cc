#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <stdexcept>

#include "base/crypto.h"

namespace telegrad {
namespace {

constexpr std::size_t kHash = 32;

unsigned char* bytes(std::string& s) { return reinterpret_cast<unsigned char*>(s.data()); }
const unsigned char* bytes(std::string_view s) { return reinterpret_cast<const unsigned char*>(s.data()); }

OSSL_PARAM octets(const char* name, std::string_view value) {
  return OSSL_PARAM_construct_octet_string(name, const_cast<char*>(value.data()), value.size());
}

}  // namespace

std::string openssl_version() { return OpenSSL_version(OPENSSL_VERSION_STRING); }

std::string hmac_sha256(std::string_view key, std::string_view message) {
  std::string mac(kHash, '\0');
  unsigned int size = 0;
  const char* const secret = key.empty() ? "" : key.data();  // OpenSSL takes a null key for "as before"
  if (!HMAC(EVP_sha256(), secret, static_cast<int>(key.size()), bytes(message), message.size(), bytes(mac), &size))
    throw std::runtime_error("OpenSSL cannot compute HMAC-SHA256");
  return mac;
}

std::string derive_key(std::string_view secret, std::string_view purpose, std::size_t size) {
  EVP_KDF* const kdf = EVP_KDF_fetch(nullptr, "HKDF", nullptr);
  EVP_KDF_CTX* const context = EVP_KDF_CTX_new(kdf);  // null for null
  EVP_KDF_free(kdf);
  char hash[] = "SHA256";
  OSSL_PARAM parameters[] = {OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, hash, 0),
                             octets(OSSL_KDF_PARAM_KEY, secret), octets(OSSL_KDF_PARAM_INFO, purpose),
                             OSSL_PARAM_construct_end()};
  std::string key(size, '\0');
  const bool done = context && EVP_KDF_derive(context, bytes(key), size, parameters) > 0;
  EVP_KDF_CTX_free(context);
  if (!done) throw std::runtime_error("OpenSSL cannot derive a key (HKDF)");
  return key;
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace telegrad
