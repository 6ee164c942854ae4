// Where shared-memory links begin: shm:@name or shm:/path.
#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>

#include "transports/shm.h"
#include "transports/transports.h"
#include "transports/unix_socket.h"

namespace telegrad {
namespace {

class ShmListener final : public Listener {
 public:
  explicit ShmListener(const std::string& address)
      : acceptor_(listen_unix(SOCK_SEQPACKET, address)), address_(address) {}

  int fd() const override { return acceptor_.fd(); }
  std::string address() const override { return address_; }
  std::unique_ptr<Link> accept() override {
    Descriptor s = acceptor_.accept();
    return s ? ShmLink::accept(std::move(s), address_) : nullptr;
  }

 private:
  Acceptor acceptor_;
  const std::string address_;
};

class ShmTransport final : public Transport {
 public:
  std::unique_ptr<Listener> listen(const std::string& address) override {
    return std::make_unique<ShmListener>(address);
  }
  std::unique_ptr<Link> connect(const std::string& address) override {
    return ShmLink::connect(connect_unix(SOCK_SEQPACKET, address), address);
  }
};

}  // namespace

Transport* shm_transport() {
  static ShmTransport t;
  return &t;
}

}  // namespace telegrad
