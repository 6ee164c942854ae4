// Unix-domain and TCP sockets: how a stream link's socket comes to be.
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "transports/peer_user.h"
#include "transports/stream.h"
#include "transports/transports.h"

namespace telegrad {
namespace {

constexpr int kSocketBuffer = 1 << 20;
constexpr int kBacklog = 1024;

[[noreturn]] void raise(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::string after_scheme(const std::string& address) { return address.substr(address.find(':') + 1); }

Descriptor make_socket(int family, const std::string& address) {
  Descriptor s(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!s) raise(errno, "cannot make a socket for " + address);
  return s;
}

void tune(int fd, bool tcp) {
  const int on = 1;
  const int buffer = kSocketBuffer;
  // TCP sizes its own buffers better than we can; a Unix socket has one fixed size.
  if (tcp) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  } else {
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
  }
}

std::optional<Credentials> local_tcp_peer(int fd) {
  const auto user = user_of_local_peer(fd);
  if (!user) return std::nullopt;
  return Credentials{.pid = 0, .uid = *user};
}

std::optional<Credentials> unix_peer(int fd) {
  ucred c;
  socklen_t size = sizeof c;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &c, &size) != 0) return std::nullopt;
  return Credentials{.pid = c.pid, .uid = c.uid};
}

class SocketListener final : public Listener {
 public:
  SocketListener(Descriptor socket, std::string address, bool tcp)
      : socket_(std::move(socket)), address_(std::move(address)), tcp_(tcp) {}

  int fd() const override { return socket_.get(); }
  std::string address() const override { return address_; }

  std::unique_ptr<Link> accept() override {
    Descriptor s(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!s && (errno == EMFILE || errno == ENFILE)) turn_one_away();
    if (!s) return nullptr;
    tune(s.get(), tcp_);
    return std::make_unique<StreamLink>(std::move(s), address_, false, tcp_ ? local_tcp_peer : unix_peer);
  }

 private:
  static Descriptor make_spare() { return Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

  /// Out of descriptors: whoever knocks is told so by an end of stream. Left waiting, it would wake us for ever.
  void turn_one_away() {
    spare_ = Descriptor();
    Descriptor(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    spare_ = make_spare();
  }

  Descriptor socket_;
  Descriptor spare_ = make_spare();
  std::string address_;
  bool tcp_;
};

// ---- unix:@name (abstract: goes with the process, leaves no file) or unix:/path

class UnixTransport final : public Transport {
 public:
  std::unique_ptr<Listener> listen(const std::string& address) override {
    Descriptor s = make_socket(AF_UNIX, address);
    auto [name, size] = parse(address);
    if (::bind(s.get(), reinterpret_cast<sockaddr*>(&name), size) != 0) raise(errno, "cannot listen on " + address);
    if (::listen(s.get(), kBacklog) != 0) raise(errno, "cannot listen on " + address);
    return std::make_unique<SocketListener>(std::move(s), address, false);
  }

  std::unique_ptr<Link> connect(const std::string& address) override {
    Descriptor s = make_socket(AF_UNIX, address);
    tune(s.get(), false);
    auto [name, size] = parse(address);
    if (::connect(s.get(), reinterpret_cast<sockaddr*>(&name), size) != 0) raise(errno, "cannot reach " + address);
    return std::make_unique<StreamLink>(std::move(s), address, false, unix_peer);
  }

 private:
  static std::pair<sockaddr_un, socklen_t> parse(const std::string& address) {
    const std::string path = after_scheme(address);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    if (path.empty() || path.size() >= sizeof name.sun_path) raise(ENAMETOOLONG, "not a socket address: " + address);
    std::memcpy(name.sun_path, path.data(), path.size());
    if (path[0] != '@') return {name, sizeof name};
    name.sun_path[0] = 0;
    return {name, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size())};
  }
};

// ---- tcp:host:port, tcp:[v6]:port; port 0 lets the system choose

struct Resolved {
  addrinfo* list = nullptr;
  ~Resolved() {
    if (list) freeaddrinfo(list);
  }
};

class TcpTransport final : public Transport {
 public:
  std::unique_ptr<Listener> listen(const std::string& address) override {
    Resolved r = resolve(address, AI_PASSIVE);
    int error = EADDRNOTAVAIL;
    for (addrinfo* a = r.list; a; a = a->ai_next) {
      Descriptor s = make_socket(a->ai_family, address);
      const int on = 1;
      setsockopt(s.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
      if (::bind(s.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(s.get(), kBacklog) == 0) {
        std::string bound = "tcp:" + local_name(s.get());
        return std::make_unique<SocketListener>(std::move(s), std::move(bound), true);
      }
      error = errno;
    }
    raise(error, "cannot listen on " + address);
  }

  std::unique_ptr<Link> connect(const std::string& address) override {
    // Only numeric addresses are published, so this never waits for a name server.
    Resolved r = resolve(address, AI_NUMERICHOST);
    Descriptor s = make_socket(r.list->ai_family, address);
    tune(s.get(), true);
    const bool at_once = ::connect(s.get(), r.list->ai_addr, r.list->ai_addrlen) == 0;
    if (!at_once && errno != EINPROGRESS) raise(errno, "cannot reach " + address);
    return std::make_unique<StreamLink>(std::move(s), address, !at_once, local_tcp_peer);
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

Transport* unix_transport() {
  static UnixTransport t;
  return &t;
}

Transport* tcp_transport() {
  static TcpTransport t;
  return &t;
}

}  // namespace telegrad
