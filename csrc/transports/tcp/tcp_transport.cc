// Stream links over TCP: tcp:host:port, tcp:[v6]:port; with port 0 the system selects one. Encrypted: tls:host:port.
//
// An engine with LinkSecurity uses only the latter, one without only the former: neither end can be made to use less.
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <system_error>

#include "base/peer_credentials.h"
#include "transports/stream/socket.h"
#include "transports/stream/socket_listener.h"
#include "transports/tcp/congestion.h"
#include "transports/tcp/laned_link.h"
#include "transports/tcp/resumable_link.h"
#include "transports/tls/security.h"
#include "transports/transports.h"

namespace telegrad {
namespace {

/// Leaves buffer sizes to the kernel, which tunes them better.
void set_no_delay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/// Limits what small frames queue behind in the socket: bytes that the kernel holds and cannot send yet.
void limit_unsent(int fd) {
  constexpr int kMaxUnsent = 256 << 10;
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kMaxUnsent, sizeof kMaxUnsent);
}

/// Sends keepalive probes, which also keep the entries of NATs, and limits the time without an acknowledgement. Without
/// a limit, the probes stay: the kernel of the other end answers them, whether its process reads or not.
void set_silence_limit(int fd, Nanos limit) {
  constexpr int kProbes = 3;
  const int limit_ms = static_cast<int>(std::min<Nanos>(limit / kMillisecond, INT_MAX));  // 0: the system's
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof limit_ms);
  if (limit == 0) return;
  const int on = 1, probes = kProbes;
  const int pause = std::max(static_cast<int>(limit / kSecond) / (kProbes + 1), 1);  // seconds
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &pause, sizeof pause);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &pause, sizeof pause);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

PeerCredentials peer_credentials(int fd, CredentialLookup& lookup) { return lookup.of_tcp_peer(fd); }

/// Returns the other end's IPv4 address, or its IPv6 network, because one host commonly has all addresses of that.
std::string source(int fd) {
  sockaddr_storage a{};
  socklen_t size = sizeof a;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&a), &size) != 0) return "nowhere";
  const auto end = tcp_end(a);
  if (end && !end->is_v4()) {
    std::memset(reinterpret_cast<sockaddr_in6&>(a).sin6_addr.s6_addr + 8, 0, 8);
  }
  char host[NI_MAXHOST];
  return getnameinfo(reinterpret_cast<sockaddr*>(&a), size, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0
             ? std::string(host) + (end && !end->is_v4() ? "/64" : "")
             : "nowhere";
}

constexpr SocketKind kTcpSocket{.peer_credentials = peer_credentials,
                                .source = source,
                                .before_large = [](int fd) { select_congestion_control(fd); },
                                .set_silence_limit = set_silence_limit};

std::unique_ptr<Link> link_over(UniqueFd socket, const std::string& address, bool initiator, bool connecting,
                                const LinkSecurityPtr& security) {
  set_no_delay(socket.get());
  limit_unsent(socket.get());
  auto stream = security ? make_tls_stream(std::move(socket), security, initiator)
                         : std::make_unique<ByteStream>(std::move(socket));
  return std::make_unique<ResumableLink>(
      std::make_unique<LanedLink>(std::move(stream), address, connecting, kTcpSocket));
}

/// Throws if the address is encrypted and the engine's connections are not, or the reverse.
void check_security(const std::string& address, const LinkSecurityPtr& security) {
  if (address.starts_with("tls:") == (security != nullptr)) return;
  const std::string with = "is encrypted, but this worker does not encrypt";
  const std::string without = "is not encrypted, but this worker encrypts";
  raise(EPROTONOSUPPORT, address + " " + (security ? without : with) +
                             ": give all workers the same secret or certificates, and the same option encryption");
}

struct Resolved {
  addrinfo* list = nullptr;
  ~Resolved() {
    if (list) freeaddrinfo(list);
  }
};

class TcpTransport final : public Transport {
 public:
  std::unique_ptr<Listener> listen(const std::string& address, const LinkSecurityPtr& security) override {
    check_security(address, security);
    Resolved r = resolve(address, AI_PASSIVE);
    int error = EADDRNOTAVAIL;
    for (addrinfo* a = r.list; a; a = a->ai_next) {
      UniqueFd s = make_socket(a->ai_family, SOCK_STREAM, address);
      const int on = 1;
      setsockopt(s.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
      disable_pacing(s.get());
      if (::bind(s.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(s.get(), kListenBacklog) == 0) {
        std::string bound = address.substr(0, address.find(':') + 1) + local_name(s.get());
        return std::make_unique<SocketListener>(std::move(s), std::move(bound),
                                                [security](UniqueFd socket, const std::string& at) {
                                                  return link_over(std::move(socket), at, false, false, security);
                                                });
      }
      error = errno;
    }
    raise(error, "cannot listen on " + address);
  }

  std::unique_ptr<Link> connect(const std::string& address, const LinkSecurityPtr& security) override {
    check_security(address, security);
    // Only numeric addresses are published, so this never waits for DNS.
    Resolved r = resolve(address, AI_NUMERICHOST);
    UniqueFd s = make_socket(r.list->ai_family, SOCK_STREAM, address);
    disable_pacing(s.get());
    const bool at_once = ::connect(s.get(), r.list->ai_addr, r.list->ai_addrlen) == 0;
    if (!at_once && errno != EINPROGRESS) raise(errno, "cannot reach " + address);
    return link_over(std::move(s), address, true, !at_once, security);
  }

  bool is_resumable() const override { return true; }

  bool is_refused(const std::string& address, const LinkSecurityPtr& security) override {
    try {
      const auto link = connect(address, security);
      pollfd fd{.fd = link->fd(), .events = POLLOUT, .revents = 0};
      int error = 0;
      socklen_t size = sizeof error;
      return ::poll(&fd, 1, 0) == 1 && getsockopt(fd.fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 &&
             error == ECONNREFUSED;
    } catch (const std::system_error& e) {
      return e.code().value() == ECONNREFUSED;
    } catch (const std::exception&) {  // no memory
      return false;
    }
  }

 private:
  static Resolved resolve(const std::string& address, int flags) {
    std::string rest = after_scheme(address);
    const std::size_t colon = rest.rfind(':');
    if (colon == std::string::npos) raise(EINVAL, "not host:port: " + address);
    std::string host = rest.substr(0, colon);
    const std::string port = rest.substr(colon + 1);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    Resolved r;
    const int code = getaddrinfo(host.empty() ? nullptr : host.c_str(), port.c_str(), &hints, &r.list);
    if (code != 0) raise(EADDRNOTAVAIL, "cannot resolve " + address + " (" + gai_strerror(code) + ")");
    return r;
  }

  static std::string local_name(int fd) {
    sockaddr_storage a{};
    socklen_t size = sizeof a;
    getsockname(fd, reinterpret_cast<sockaddr*>(&a), &size);
    char host[NI_MAXHOST];
    char port[NI_MAXSERV];
    getnameinfo(reinterpret_cast<sockaddr*>(&a), size, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    const bool v6 = a.ss_family == AF_INET6;
    return (v6 ? "[" : "") + std::string(host) + (v6 ? "]:" : ":") + port;
  }
};

}  // namespace

Transport* tcp_transport() {
  static TcpTransport t;
  return &t;
}

}  // namespace telegrad
