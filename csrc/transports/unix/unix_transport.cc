// Stream links over Unix sockets: unix:@name or unix:/path.
#include <sys/socket.h>

#include "transports/stream/socket_listener.h"
#include "transports/tcp/laned_link.h"
#include "transports/transports.h"
#include "transports/unix/unix_socket.h"

namespace telegrad {
namespace {

constexpr int kSocketBuffer = 1 << 20;  // fixed, because the system's default is small and does not grow

void tune(int fd) { setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSocketBuffer, sizeof kSocketBuffer); }

constexpr SocketKind kUnixSocket{.peer_credentials = [](int fd, CredentialLookup&) { return unix_credentials(fd); }};

std::unique_ptr<Link> link_over(UniqueFd socket, const std::string& address) {
  tune(socket.get());
  return std::make_unique<LanedLink>(std::make_unique<ByteStream>(std::move(socket)), address, false, kUnixSocket,
                                     Striping{.lanes = false});
}

class UnixTransport final : public Transport {
 public:
  std::unique_ptr<Listener> listen(const std::string& address, const LinkSecurityPtr&) override {
    return std::make_unique<SocketListener>(listen_unix(SOCK_STREAM, address), address, link_over);
  }

  std::unique_ptr<Link> connect(const std::string& address, const LinkSecurityPtr&) override {
    return link_over(connect_unix(SOCK_STREAM, address), address);
  }
};

}  // namespace

Transport* unix_transport() {
  static UnixTransport t;
  return &t;
}

}  // namespace telegrad
