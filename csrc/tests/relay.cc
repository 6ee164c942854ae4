#include "tests/relay.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "tests/check.h"

namespace telegrad::test {
namespace {

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_port = htons(port);
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return a;
}

void bind_to_loopback(int fd, std::uint16_t& port) {
  sockaddr_in a = loopback(0);
  socklen_t size = sizeof a;
  CHECK_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof a), 0);
  CHECK_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&a), &size), 0);
  port = ntohs(a.sin_port);
}

}  // namespace

Relay::Relay(const std::string& target)
    : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  const std::size_t colon = target.rfind(':');
  port_ = static_cast<std::uint16_t>(std::stoi(target.substr(colon + 1)));
  std::uint16_t own = 0;
  bind_to_loopback(listener_.get(), own);
  CHECK_EQ(::listen(listener_.get(), 64), 0);
  address_ = target.substr(0, colon + 1) + std::to_string(own);
  thread_ = std::thread([this] { run(); });
}

Relay::~Relay() {
  stops_ = true;
  eventfd_write(wake_.get(), 1);
  thread_.join();
}

void Relay::freeze() {
  frozen = true;
  for (const int before = turns_; turns_ < before + 2;) std::this_thread::yield();
}

void Relay::reset() {
  resets_ = true;
  eventfd_write(wake_.get(), 1);
  while (resets_) std::this_thread::yield();
}

void Relay::reset(Route& route) {
  for (UniqueFd& end : route.ends) {
    const int hard[2] = {1, 0};  // closing sends a reset
    setsockopt(end.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    end = UniqueFd();
  }
}

void Relay::accept() {
  while (true) {
    UniqueFd in(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!in) return;
    ++accepted;
    if (!open) continue;
    UniqueFd out(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in to = loopback(port_);
    if (::connect(out.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) continue;
    auto route = std::make_unique<Route>();
    route->ends[0] = std::move(in);
    route->ends[1] = std::move(out);
    route->mute = mute;
    routes_.push_back(std::move(route));
  }
}

/// Passes on what one end has sent; returns false if it has closed.
bool Relay::pass(Route& route, int from) {
  std::array<char, 16 << 10> buffer;
  const std::int64_t most = std::min<std::int64_t>(left, static_cast<std::int64_t>(buffer.size()));
  const ssize_t n = ::recv(route.ends[from].get(), buffer.data(), static_cast<std::size_t>(most), MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (n <= 0) return false;
  if (route.mute) return true;
  left = left == INT64_MAX ? INT64_MAX : left - n;
  for (ssize_t sent = 0; sent < n;) {
    const int to = route.ends[1 - from].get();
    const ssize_t k = ::send(to, buffer.data() + sent, static_cast<std::size_t>(n - sent), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (k >= 0) {
      sent += k;
    } else if (errno == EAGAIN) {
      if (resets_ || stops_) return false;
      pollfd p{.fd = to, .events = POLLOUT, .revents = 0};
      ::poll(&p, 1, 10);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

void Relay::run() {
  for (; !stops_; ++turns_) {
    std::vector<pollfd> fds{{.fd = wake_.get(), .events = POLLIN, .revents = 0},
                            {.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    if (!frozen) {
      for (const auto& route : routes_) {
        for (const UniqueFd& end : route->ends) fds.push_back({.fd = end.get(), .events = POLLIN, .revents = 0});
      }
    }
    ::poll(fds.data(), fds.size(), 10);
    eventfd_t value;
    eventfd_read(wake_.get(), &value);
    if (resets_ || left <= 0) {
      for (auto& route : routes_) reset(*route);
      routes_.clear();
      left = INT64_MAX;
      resets_ = false;
      continue;
    }
    if (!frozen) {
      for (std::size_t i = 2; i < fds.size() && left > 0; ++i) {
        Route& route = *routes_[i / 2 - 1];
        if (!fds[i].revents || !route.ends[0]) continue;
        if (pass(route, static_cast<int>(i % 2))) continue;
        for (UniqueFd& end : route.ends) end = UniqueFd();  // what has been passed on still arrives
      }
      std::erase_if(routes_, [](const auto& route) { return !route->ends[0]; });
    }
    accept();
  }
  for (auto& route : routes_) reset(*route);
}

}  // namespace telegrad::test
