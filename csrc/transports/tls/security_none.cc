#include <stdexcept>

#include "base/crypto.h"
#include "transports/tls/security.h"

namespace telegrad {

LinkSecurityPtr make_tls(const TlsSettings&) { throw std::runtime_error(std::string(kNoOpenSsl)); }

std::unique_ptr<ByteStream> make_tls_stream(UniqueFd, const LinkSecurityPtr&, bool) {
  throw std::runtime_error(std::string(kNoOpenSsl));  // not reached: nothing makes a LinkSecurity
}

}  // namespace telegrad
