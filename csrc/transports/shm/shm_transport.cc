// Addresses of shared-memory links: shm:@name or shm:/path.
#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>

#include "transports/shm/shm_link.h"
#include "transports/stream/socket_listener.h"
#include "transports/transports.h"
#include "transports/unix/unix_socket.h"

namespace telegrad {
namespace {

std::unique_ptr<Link> accepted(UniqueFd socket, const std::string& address) {
  return ShmLink::accept(std::move(socket), address);
}

class ShmTransport final : public Transport {
 public:
  std::unique_ptr<Listener> listen(const std::string& address, const LinkSecurityPtr&) override {
    return std::make_unique<SocketListener>(listen_unix(SOCK_SEQPACKET, address), address, accepted);
  }
  std::unique_ptr<Link> connect(const std::string& address, const LinkSecurityPtr&) override {
    return ShmLink::connect(connect_unix(SOCK_SEQPACKET, address), address);
  }
};

}  // namespace

Transport* shm_transport() {
  static ShmTransport t;
  return &t;
}

}  // namespace telegrad
