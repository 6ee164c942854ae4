// A socket that listens, and makes links of the connections that come: for every transport that has one.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "core/transport.h"
#include "transports/descriptor.h"

namespace telegrad {

class SocketListener final : public Listener {
 public:
  /// Makes the link of a connection.
  using Make = std::unique_ptr<Link> (*)(Descriptor socket, const std::string& address);

  /// `address`: what peers connect to.
  SocketListener(Descriptor socket, std::string address, Make make)
      : socket_(std::move(socket)), address_(std::move(address)), make_(make) {}

  int fd() const override { return socket_.get(); }
  std::string address() const override { return address_; }
  /// Who cannot be let in for want of descriptors is turned away.
  std::unique_ptr<Link> accept() override;

 private:
  void turn_one_away();
  static Descriptor make_spare();

  const Descriptor socket_;
  const std::string address_;
  const Make make_;
  Descriptor spare_ = make_spare();
};

}  // namespace telegrad
