// The functions of OpenSSL against published test vectors.
#include "base/crypto.h"
#include "tests/check.h"

namespace telegrad::test {
namespace {

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    out += "0123456789abcdef"[static_cast<unsigned char>(c) >> 4];
    out += "0123456789abcdef"[c & 15];
  }
  return out;
}

CASE(hmac_vectors_of_rfc_4231) {
  CHECK_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(hex(hmac_sha256("", "")), "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

CASE(hkdf_vectors_of_rfc_5869) {  // test case 3: no salt
  CHECK_EQ(hex(derive_key(std::string(22, '\x0b'), "", 42)),
           "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8");
  CHECK(derive_key("secret", "one purpose", 32) != derive_key("secret", "another", 32));
}

CASE(comparison) {
  CHECK(equal_in_constant_time("same", "same") && equal_in_constant_time("", ""));
  CHECK(!equal_in_constant_time("same", "sane") && !equal_in_constant_time("same", "same "));
}

CASE(the_version_is_known) { CHECK(has_crypto() && openssl_version().starts_with("3.")); }

}  // namespace
}  // namespace telegrad::test
