// Listening: strangers at the door, of whom there may be many.
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "core/engine.h"

namespace telegrad {
namespace {

constexpr rlim_t kMostStrangers = 64;           // connections that may be inside the handshake at once, at most
constexpr rlim_t kShare = 8;                    // and of the descriptors one in so many; as many they leave alone
constexpr int kAcceptsPerLook = 16;             // between which those that are there already are read
constexpr Nanos kRefusalPeriod = 10 * kSecond;  // in which at most
constexpr std::size_t kRefusalLines = 100;      // lines are about refused strangers

/// What strangers may have of this process's descriptors.
struct Room {
  Room() {
    rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
    limit = files.rlim_cur;
    strangers = std::clamp<rlim_t>(limit / kShare, 1, kMostStrangers);
  }
  /// Descriptors are given out from the lowest number up, so few are left when one has a high number.
  bool has_for(int fd) const { return static_cast<rlim_t>(fd) + strangers < limit; }

  rlim_t limit = RLIM_INFINITY;
  rlim_t strangers = kMostStrangers;  // connections, and the descriptors that the program keeps for itself
};

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
  const Room room;
  for (int i = 0; i < kAcceptsPerLook; ++i) {
    ConnectionPtr displaced;
    {
      std::lock_guard lock(mutex_);  // also while it is accepted: a fork must find it among the connections
      auto link = listener.accept();
      if (!link) return;
      if (stopping()) continue;  // closes it
      const std::string source = link->source();
      if (!room.has_for(link->fd())) {
        log_refusal(*link, source,
                    "nearly all of the " + std::to_string(room.limit) +
                        " descriptors of this process are in use: raise the limit (ulimit -n)");
        continue;
      }
      if (const auto why = objection(*link)) {
        if (!why->empty()) log_refusal(*link, source, *why);
        continue;
      }
      displaced = displaced_by(source, room.strangers);
      add_connection(std::move(link), Handshake::accept(settings_.credo), false)->source = source;
    }
    if (displaced) {
      displaced->displaced = true;
      lost(displaced, "too many others came after it");
    }
  }
}

/// With the mutex held: the connection that must go when one more comes from `source`. Half of the places, at most, are
/// for one source; this host's own have no source, since they are from processes of the same user.
ConnectionPtr Engine::displaced_by(const std::string& source, std::size_t places) const {
  std::size_t all = 0, same = 0;
  ConnectionPtr oldest, oldest_same;
  for (const auto& [token, c] : connections_) {
    if (c->initiator || c->state != Connection::State::kHandshaking) continue;
    ++all;
    if (!oldest || c->id < oldest->id) oldest = c;
    if (source.empty() || c->source != source) continue;
    ++same;
    if (!oldest_same || c->id < oldest_same->id) oldest_same = c;
  }
  if (same >= std::max<std::size_t>(places / 2, 1)) return oldest_same;
  return all >= places ? oldest : nullptr;
}

/// Why the process at the other end may not talk to this one: "" when it has gone. Null: nothing speaks against it. By
/// the thread that polls.
std::optional<std::string> Engine::objection(const Link& link) {
  if (!settings_.check_uid) return std::nullopt;
  const PeerUser user = link.peer_user(users_);
  if (user.kind == PeerUser::Kind::kRemote) return std::nullopt;
  if (user.kind == PeerUser::Kind::kUnknown) {
    if (user.why.empty()) return user.why;
    return "it may be a process of another user of this host: " + user.why;
  }
  if (user.uid == geteuid()) return std::nullopt;
  return "its process belongs to another user (uid " + std::to_string(user.uid) +
         "): workers of one host must run as the same user (here uid " + std::to_string(geteuid()) + ")";
}

/// With the mutex held: a line about a stranger. Strangers may be many, so only a few lines are about them.
void Engine::log_refusal(const Link& link, const std::string& source, const std::string& why, bool displaced) {
  const Nanos at = now();
  if (displaced) {  // by a crowd, of which one line in a while tells enough: its members come again
    if (at - crowd_told_at_ < kRefusalPeriod) return;
    crowd_told_at_ = at;
  }
  if (at - refusals_since_ >= kRefusalPeriod) {
    if (refusals_ > kRefusalLines) {
      log("refused " + std::to_string(refusals_ - kRefusalLines) + " more connections without a line for each");
    }
    refusals_since_ = at;
    refusals_ = 0;
  }
  if (++refusals_ > kRefusalLines) return;
  log("refused a connection " + (source.empty() ? "" : "from " + source + " ") + "at " + link.describe() + ": " + why);
}

}  // namespace telegrad
