// Listening socket that makes links of accepted connections, for every transport with sockets.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/unique_fd.h"
#include "core/transport.h"

namespace telegrad {

class SocketListener final : public Listener {
 public:
  /// Makes the link of an accepted connection.
  using Make = std::function<std::unique_ptr<Link>(UniqueFd socket, const std::string& address)>;

  /// `address`: the address for peers.
  SocketListener(UniqueFd socket, std::string address, Make make)
      : socket_(std::move(socket)), address_(std::move(address)), make_(std::move(make)) {}

  int fd() const override { return socket_.get(); }
  std::string address() const override { return address_; }
  /// Closes a connection that cannot be accepted for lack of descriptors.
  std::unique_ptr<Link> accept() override;
  bool is_stuck() const override { return stuck_; }

 private:
  bool reject_one();
  static UniqueFd make_spare();

  const UniqueFd socket_;
  const std::string address_;
  const Make make_;
  UniqueFd spare_ = make_spare();
  bool stuck_ = false;
};

}  // namespace telegrad
