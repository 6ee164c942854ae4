// A relay between two workers over TCP, whose connections a test can break, stop and refuse.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"

namespace telegrad::test {

class Relay {
 public:
  /// Connects each connection that it accepts to `target`, "tcp:127.0.0.1:port" or "tls:127.0.0.1:port".
  explicit Relay(const std::string& target);
  ~Relay();

  /// Returns the address to connect to.
  std::string address() const { return address_; }

  /// Resets all connections at both ends.
  void reset();
  /// Closes connections as soon as they are accepted, until `open` is true again.
  std::atomic<bool> open = true;
  /// Passes nothing on, as if the network had failed.
  std::atomic<bool> frozen = false;
  /// Sets `frozen`. What is sent afterwards is not passed on.
  void freeze();
  /// Resets all connections after this number of further bytes.
  std::atomic<std::int64_t> left = INT64_MAX;
  /// Passes on only what the acceptor sends, or nothing of that, on connections that are made from now on.
  std::atomic<bool> mute = false;
  /// Accepted connections so far.
  std::atomic<int> accepted = 0;

 private:
  struct Route {
    UniqueFd ends[2];  // to the initiator, to the target
    bool mute = false;
  };
  void run();
  void accept();
  bool pass(Route& route, int from);
  static void reset(Route& route);

  std::string address_;
  std::uint16_t port_ = 0;
  UniqueFd listener_, wake_;
  std::atomic<bool> resets_ = false, stops_ = false;
  std::atomic<int> turns_ = 0;
  std::vector<std::unique_ptr<Route>> routes_;
  std::thread thread_;
};

}  // namespace telegrad::test
