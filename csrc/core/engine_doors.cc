// Listening: strangers at the door, of whom there may be many.
#include <sys/epoll.h>

#include <cerrno>
#include <system_error>

#include "core/engine.h"

namespace telegrad {
namespace {

constexpr std::size_t kMaxStrangers = 1024;     // connections that may be inside the handshake at once
constexpr Nanos kRefusalPeriod = 10 * kSecond;  // in which at most
constexpr std::size_t kRefusalLines = 100;      // lines are about refused strangers

}  // namespace

std::string Engine::listen(const std::string& address) {
  Transport* transport = find_transport(address);
  if (!transport) throw std::system_error(EPROTONOSUPPORT, std::generic_category(), "cannot listen on " + address);
  auto listener = transport->listen(address);
  const std::string bound = listener->address();
  std::lock_guard lock(mutex_);
  const std::uint64_t token = next_token_++;
  epoll_event event{.events = EPOLLIN, .data = {.u64 = token}};
  epoll_ctl(inner_.get(), EPOLL_CTL_ADD, listener->fd(), &event);
  listeners_.emplace(token, std::move(listener));
  return bound;
}

void Engine::accept_from(Listener& listener) {
  while (true) {
    ConnectionPtr oldest;
    {
      std::lock_guard lock(mutex_);  // also while it is accepted: a fork must find it among the connections
      auto link = listener.accept();
      if (!link) return;
      if (stopping()) continue;  // closes it
      if (strangers_ >= kMaxStrangers) {
        for (auto& [token, c] : connections_) {
          const bool stranger = !c->initiator && c->state == Connection::State::kHandshaking;
          if (stranger && (!oldest || c->id < oldest->id)) oldest = c;
        }
      }
      add_connection(std::move(link), Handshake::accept(settings_.credo), false);
    }
    if (oldest) lost(oldest, "too many others came after it");
  }
}

/// With the mutex held: a line about a stranger. Strangers may be many, so only a few lines are about them.
void Engine::log_refusal(const Connection& c, const std::string& why) {
  const Nanos at = now();
  if (at - refusals_since_ >= kRefusalPeriod) {
    if (refusals_ > kRefusalLines) {
      log("refused " + std::to_string(refusals_ - kRefusalLines) + " more connections without a line for each");
    }
    refusals_since_ = at;
    refusals_ = 0;
  }
  if (++refusals_ <= kRefusalLines) log("refused a connection at " + c.link->describe() + ": " + why);
}

}  // namespace telegrad
