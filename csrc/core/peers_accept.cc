// Listening: accepted connections before their handshake has ended. Their number is limited.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/crypto.h"
#include "core/engine_parts.h"
#include "core/peers.h"
#include "core/tuning.h"

namespace telegrad {
namespace {

/// Number of descriptors that unauthenticated connections may use in this process.
struct DescriptorBudget {
  /// `most`: unauthenticated connections, however many descriptors there are.
  explicit DescriptorBudget(std::uint64_t most) : unauthenticated(most) {
    rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
    limit = files.rlim_cur;
    unauthenticated = std::clamp<rlim_t>(limit / kUnauthenticatedShare, 1, most);
  }
  /// Descriptors are allocated from the lowest free number, so a high number means that few are left.
  bool has_for(int fd) const { return static_cast<rlim_t>(fd) + unauthenticated < limit; }

  rlim_t limit = RLIM_INFINITY;
  rlim_t unauthenticated;  // limit of connections, and number of descriptors left to the program
};

}  // namespace

std::string Peers::listen(const std::string& address) {
  Transport* transport = find_transport(address);
  if (!transport) throw std::system_error(EPROTONOSUPPORT, std::generic_category(), "cannot listen on " + address);
  auto listener = transport->listen(address, parts_.settings.security);
  const std::string bound = listener->address();
  Lock lock(parts_.mutex);
  const std::uint64_t token = next_token_++;
  parts_.leader.add_fd(listener->fd(), token);
  listeners_.emplace(token, std::move(listener));
  return bound;
}

void Peers::accept_from(Listener& listener) {
  const DescriptorBudget budget(parts_.settings.load.unauthenticated);
  for (int i = 0; i < kAcceptsPerPoll; ++i) {
    ConnectionPtr displaced;
    {
      Lock lock(parts_.mutex);  // held during accept: a fork must find the link here or among the connections
      accepting_ = listener.accept();
      if (!accepting_) {
        if (listener.is_stuck()) pause_listening(listener);
        return;
      }
    }
    const PeerCredentials user = peer_credentials_of(*accepting_);
    {
      Lock lock(parts_.mutex);
      auto link = std::move(accepting_);
      if (parts_.is_stopping()) continue;  // closes the link
      const std::string source = link->source();
      if (!budget.has_for(link->fd())) {
        parts_.overload.count(Limit::kUnauthenticated);
        log_rejected(*link, source,
                     "nearly all of the " + std::to_string(budget.limit) +
                         " descriptors of this process are in use: raise the limit (ulimit -n)");
        continue;
      }
      if (const auto why = rejection_reason(user)) {
        if (!why->empty()) log_rejected(*link, source, *why);
        continue;
      }
      const bool own =
          user.kind == PeerCredentials::Kind::kUser;  // same user as this process, else `rejection_reason` rejects it
      displaced = connection_to_displace(own ? std::string() : source, budget.unauthenticated);
      const ConnectionPtr c = add_connection(std::move(link), Handshake::accept(parts_.settings.handshake), false);
      c->source = source;
      c->is_local = own;
    }
    if (displaced) {
      parts_.overload.count(Limit::kUnauthenticated);
      displaced->displaced = true;
      close_connection(displaced, "too many others came after it");
    }
  }
}

/// Stops polling a listener for a while: it stays readable, and the leader would spin.
void Peers::pause_listening(const Listener& listener) {
  parts_.leader.remove_fd(listener.fd());
  if (listen_again_at_ == kNever) listen_again_at_ = now() + kAcceptRetry;
  arm_timer(listen_again_at_);
}

/// Polls the listeners again that were paused.
void Peers::resume_listening(Nanos at) {
  if (listen_again_at_ == kNever) return;
  if (listen_again_at_ > at) return arm_timer(listen_again_at_);
  listen_again_at_ = kNever;
  for (const auto& [token, listener] : listeners_) parts_.leader.add_fd(listener->fd(), token);  // no effect on others
}

/// Returns the connection to close when one more is accepted from `source`. One source has at most a fourth
/// of the places. Processes of the same user and host have no source ("").
ConnectionPtr Peers::connection_to_displace(const std::string& source, std::size_t places) const {
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
  if (same >= std::max<std::size_t>(places / kSourceShare, 1)) return oldest_same;
  return all >= places ? oldest : nullptr;
}

std::uint64_t Peers::max_unauthenticated() const {
  return DescriptorBudget(parts_.settings.load.unauthenticated).unauthenticated;
}

/// Returns the user at the other end; kRemote if users are not checked. Leader only.
PeerCredentials Peers::peer_credentials_of(const Link& link) {
  return parts_.settings.check_uid ? link.peer_credentials(users_)
                                   : PeerCredentials{.kind = PeerCredentials::Kind::kRemote};
}

/// Returns the reason to reject a process of this user ("" if it has closed its end), or null to accept it.
std::optional<std::string> Peers::rejection_reason(const PeerCredentials& user) {
  if (user.kind == PeerCredentials::Kind::kRemote) {
    if (has_crypto()) return std::nullopt;
    return "it is on another host, or its user is not checked: " + std::string(kNoOpenSsl);
  }
  if (user.kind == PeerCredentials::Kind::kUnknown) {
    if (user.why.empty()) return user.why;
    return "it may be a process of another user of this host: " + user.why;
  }
  if (user.uid == geteuid()) return std::nullopt;
  return "its process belongs to another user (uid " + std::to_string(user.uid) +
         "): workers of one host must run as the same user (here uid " + std::to_string(geteuid()) + ")";
}

/// Logs a rejected connection. Only a few lines per interval are logged, as there may be many.
void Peers::log_rejected(const Link& link, const std::string& source, const std::string& why, bool displaced) {
  const Nanos at = now();
  if (displaced) {  // one line per interval is enough: displaced connections try again
    if (at - displaced_logged_at_ < kRejectLogInterval) return;
    displaced_logged_at_ = at;
  }
  if (at - rejected_since_ >= kRejectLogInterval) {
    if (rejected_ > kRejectLogLines) {
      parts_.queue.log("refused " + std::to_string(rejected_ - kRejectLogLines) +
                       " more connections without a line for each");
    }
    rejected_since_ = at;
    rejected_ = 0;
  }
  if (++rejected_ > kRejectLogLines) return;
  parts_.queue.log("refused a connection " + (source.empty() ? "" : "from " + source + " ") + "at " + link.describe() +
                   ": " + why);
}

}  // namespace telegrad
