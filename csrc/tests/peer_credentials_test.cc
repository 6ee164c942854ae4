// The user of the process at the other end of a TCP connection on this host.
#include "base/peer_credentials.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "tests/check.h"
#include "transports/stream/stream_link.h"

namespace telegrad::test {
namespace {

sockaddr_storage address(const std::string& ip, std::uint16_t port) {
  sockaddr_storage a{};
  if (ip.find(':') == std::string::npos) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(a);
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    CHECK_EQ(inet_pton(AF_INET, ip.c_str(), &v4.sin_addr), 1);
  } else {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(a);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    CHECK_EQ(inet_pton(AF_INET6, ip.c_str(), &v6.sin6_addr), 1);
  }
  return a;
}

TcpEnd end(const std::string& ip, std::uint16_t port) { return *tcp_end(address(ip, port)); }

/// Returns the user in a table; null if no process has the socket.
std::optional<uid_t> find(const std::string& table, const TcpEnd& local, const TcpEnd& remote) {
  const auto owner = owner_in_table(table, local, remote);
  return owner && owner->inode != 0 ? std::optional(owner->uid) : std::nullopt;
}

bool is_mine(const PeerCredentials& user) { return user.kind == PeerCredentials::Kind::kUser && user.uid == geteuid(); }

/// Uses up all descriptors for its lifetime.
struct NoDescriptors {
  NoDescriptors() {
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before); }
  rlimit before;
};

const std::string kTable =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1619 1 00000000 100\n"
    "   1: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1001        0 2000 1 00000000 20\n"
    "   2: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1002        0 2001 1 00000000 20\n"
    "   3: 0100007F:C351 0100007F:1F90 06 00000000:00000000 03:00000000 00000000     0        0 0 3 00000000\n";

const std::string kTable6 =
    "  sl  local_address remote_address st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 00000000000000000000000001000000:C350 00000000000000000000000001000000:1F90 01 00000000:00000000"
    " 00:00000000 00000000  1003        0 2002 1 00000000 20\n"
    "   1: 0000000000000000FFFF00000100007F:C352 0000000000000000FFFF00000100007F:1F90 01 00000000:00000000"
    " 00:00000000 00000000  1004        0 2003 1 00000000 20\n";

CASE(tables_are_parsed) {
  const TcpEnd server = end("127.0.0.1", 8080);
  CHECK(find(kTable, end("127.0.0.1", 50000), server) == uid_t{1001});
  CHECK(find(kTable, server, end("127.0.0.1", 50000)) == uid_t{1002});
  CHECK(!find(kTable, end("127.0.0.1", 50001), server));  // its process has closed it
  CHECK(!find(kTable, end("127.0.0.1", 50002), server));
  CHECK(!find(kTable, end("127.0.0.2", 50000), server));
  CHECK(find(kTable6, end("::1", 50000), end("::1", 8080)) == uid_t{1003});
  CHECK(find(kTable6, end("127.0.0.1", 50002), server) == uid_t{1004});
  CHECK(!find("no table at all\n", server, server));
  CHECK(!find("", server, server));
  CHECK(find(kTable.substr(0, kTable.size() - 1), server, end("127.0.0.1", 50000)) == uid_t{1002});
}

struct Connected {
  explicit Connected(const std::string& listen_at, const std::string& connect_to) {
    sockaddr_storage at = address(listen_at, 0);
    const UniqueFd listener(::socket(at.ss_family, SOCK_STREAM, 0));
    socklen_t size = sizeof at;
    works = ::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), size) == 0 && ::listen(listener.get(), 1) == 0;
    if (!works) return;
    getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size);
    const sockaddr_storage to = address(connect_to, tcp_end(at)->port);
    a = UniqueFd(::socket(to.ss_family, SOCK_STREAM, 0));
    CHECK_EQ(::connect(a.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
    b = UniqueFd(::accept(listener.get(), nullptr, nullptr));
  }
  bool works = false;
  UniqueFd a, b;
};

CASE(both_ends_are_found) {
  const std::pair<const char*, const char*> pairs[] = {
      {"127.0.0.1", "127.0.0.1"}, {"::1", "::1"}, {"::", "127.0.0.1"}, {"::", "::ffff:127.0.0.1"}};
  for (const bool over_netlink : {true, false}) {
    CredentialLookup lookup(over_netlink);
    for (const auto& [listen_at, connect_to] : pairs) {
      const Connected c(listen_at, connect_to);
      if (!c.works) continue;  // no IPv6 on this machine
      CHECK(is_mine(lookup.of_tcp_peer(c.a.get())));
      CHECK(is_mine(lookup.of_tcp_peer(c.b.get())));
    }
  }
}

CASE(a_closed_end_has_no_user) {
  for (const bool over_netlink : {true, false}) {
    CredentialLookup lookup(over_netlink);
    Connected c("127.0.0.1", "127.0.0.1");
    c.a = UniqueFd();
    const UniqueFd alone(::socket(AF_INET, SOCK_STREAM, 0));
    for (const int fd : {c.b.get(), alone.get()}) {
      const PeerCredentials user = lookup.of_tcp_peer(fd);
      CHECK(user.kind == PeerCredentials::Kind::kUnknown);
      CHECK_EQ(user.uid, kNoUser);
      CHECK_EQ(user.why, "");
    }
  }
}

/// Descriptors opened in the constructor suffice when no other can be opened.
CASE(users_are_found_without_a_free_descriptor) {
  const Connected c("127.0.0.1", "127.0.0.1");
  for (const bool over_netlink : {true, false}) {
    CredentialLookup lookup(over_netlink);
    const NoDescriptors none;
    CHECK(is_mine(lookup.of_tcp_peer(c.b.get())));
  }
}

/// An unknown user is not treated as a peer on another host.
CASE(a_user_that_cannot_be_looked_up_is_unknown) {
  const Connected c("127.0.0.1", "127.0.0.1");
  std::optional<CredentialLookup> lookup;
  {
    const NoDescriptors none;
    lookup.emplace();
    const PeerCredentials user = lookup->of_tcp_peer(c.b.get());
    CHECK(user.kind == PeerCredentials::Kind::kUnknown);
    CHECK_SAYS(user.why, "does not tell whether its address is this host's (Too many open files)");
  }
  const PeerCredentials user = lookup->of_tcp_peer(c.b.get());
  CHECK(user.kind == PeerCredentials::Kind::kUnknown);
  CHECK_SAYS(user.why, "the kernel lists no TCP sockets");
}

CASE(another_user_is_found) {
  if (geteuid() != 0) return;  // only root can change its user
  constexpr uid_t kTestSocket = 65534;
  sockaddr_storage at = address("127.0.0.1", 0);
  socklen_t size = sizeof at;
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
  CHECK_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), size), 0);
  CHECK_EQ(::listen(listener.get(), 1), 0);
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size);
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(kTestSocket) != 0) _exit(1);
    const int s = ::socket(AF_INET, SOCK_STREAM, 0);
    if (::connect(s, reinterpret_cast<sockaddr*>(&at), size) != 0) _exit(2);
    char byte;
    _exit(::read(s, &byte, 1) == 0 ? 0 : 3);  // until the other end closes
  }
  UniqueFd accepted(::accept(listener.get(), nullptr, nullptr));
  CredentialLookup lookup;
  const PeerCredentials user = lookup.of_tcp_peer(accepted.get());
  accepted = UniqueFd();
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK(user.kind == PeerCredentials::Kind::kUser);
  CHECK_EQ(user.uid, kTestSocket);
}

}  // namespace
}  // namespace telegrad::test
