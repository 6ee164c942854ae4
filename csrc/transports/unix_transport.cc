// Stream links over Unix sockets: unix:@name or unix:/path.
#include <sys/socket.h>

#include "transports/stream.h"
#include "transports/transports.h"
#include "transports/unix_socket.h"

namespace telegrad {
namespace {

constexpr int kSocketBuffer = 1 << 20;  // it has one fixed size, and the system's is small

void tune(int fd) { setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSocketBuffer, sizeof kSocketBuffer); }

constexpr SocketKind kUnixSocket{.credentials = unix_peer};

class UnixListener final : public Listener {
 public:
  UnixListener(Descriptor socket, std::string address) : acceptor_(std::move(socket)), address_(std::move(address)) {}

  int fd() const override { return acceptor_.fd(); }
  std::string address() const override { return address_; }

  std::unique_ptr<Link> accept() override {
    Descriptor s = acceptor_.accept();
    if (!s) return nullptr;
    tune(s.get());
    return std::make_unique<StreamLink>(std::move(s), address_, false, kUnixSocket);
  }

 private:
  Acceptor acceptor_;
  std::string address_;
};

class UnixTransport final : public Transport {
 public:
  std::unique_ptr<Listener> listen(const std::string& address) override {
    return std::make_unique<UnixListener>(listen_unix(SOCK_STREAM, address), address);
  }

  std::unique_ptr<Link> connect(const std::string& address) override {
    Descriptor s = connect_unix(SOCK_STREAM, address);
    tune(s.get());
    return std::make_unique<StreamLink>(std::move(s), address, false, kUnixSocket);
  }
};

}  // namespace

Transport* unix_transport() {
  static UnixTransport t;
  return &t;
}

}  // namespace telegrad
