// Whose process is at the other end of a TCP connection on this host.
#include "transports/peer_user.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "tests/check.h"
#include "transports/stream.h"

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

std::optional<uid_t> find(std::string table, const TcpEnd& mine, const TcpEnd& theirs) {
  std::FILE* file = fmemopen(table.data(), table.size(), "r");
  CHECK(file != nullptr);
  const auto found = user_in_table(file, mine, theirs);
  std::fclose(file);
  return found;
}

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

CASE(tables_are_understood) {
  const TcpEnd server = end("127.0.0.1", 8080);
  CHECK(find(kTable, end("127.0.0.1", 50000), server) == uid_t{1001});
  CHECK(find(kTable, server, end("127.0.0.1", 50000)) == uid_t{1002});
  CHECK(!find(kTable, end("127.0.0.1", 50001), server));  // its process has gone
  CHECK(!find(kTable, end("127.0.0.1", 50002), server));
  CHECK(!find(kTable, end("127.0.0.2", 50000), server));
  CHECK(find(kTable6, end("::1", 50000), end("::1", 8080)) == uid_t{1003});
  CHECK(find(kTable6, end("127.0.0.1", 50002), server) == uid_t{1004});
  CHECK(!find("no table at all\n", server, server));
}

struct Connected {
  explicit Connected(const std::string& listen_at, const std::string& connect_to) {
    sockaddr_storage at = address(listen_at, 0);
    const Descriptor listener(::socket(at.ss_family, SOCK_STREAM, 0));
    socklen_t size = sizeof at;
    works = ::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), size) == 0 && ::listen(listener.get(), 1) == 0;
    if (!works) return;
    getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size);
    const sockaddr_storage to = address(connect_to, tcp_end(at)->port);
    a = Descriptor(::socket(to.ss_family, SOCK_STREAM, 0));
    CHECK_EQ(::connect(a.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
    b = Descriptor(::accept(listener.get(), nullptr, nullptr));
  }
  bool works = false;
  Descriptor a, b;
};

CASE(both_ends_are_found) {
  const std::pair<const char*, const char*> pairs[] = {
      {"127.0.0.1", "127.0.0.1"}, {"::1", "::1"}, {"::", "127.0.0.1"}, {"::", "::ffff:127.0.0.1"}};
  for (const auto& [listen_at, connect_to] : pairs) {
    const Connected c(listen_at, connect_to);
    if (!c.works) continue;  // no IPv6 here
    CHECK(user_of_local_peer(c.a.get()) == geteuid());
    CHECK(user_of_local_peer(c.b.get()) == geteuid());
  }
}

CASE(who_has_gone_is_nobody) {
  Connected c("127.0.0.1", "127.0.0.1");
  c.a = Descriptor();
  CHECK(!user_of_local_peer(c.b.get()));
  const Descriptor alone(::socket(AF_INET, SOCK_STREAM, 0));
  CHECK(!user_of_local_peer(alone.get()));
}

CASE(another_user_is_seen) {
  if (geteuid() != 0) return;  // only root can play one
  constexpr uid_t kNobody = 65534;
  sockaddr_storage at = address("127.0.0.1", 0);
  socklen_t size = sizeof at;
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM, 0));
  CHECK_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), size), 0);
  CHECK_EQ(::listen(listener.get(), 1), 0);
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size);
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(kNobody) != 0) _exit(1);
    const int s = ::socket(AF_INET, SOCK_STREAM, 0);
    if (::connect(s, reinterpret_cast<sockaddr*>(&at), size) != 0) _exit(2);
    char byte;
    _exit(::read(s, &byte, 1) == 0 ? 0 : 3);  // until the other end closes
  }
  Descriptor accepted(::accept(listener.get(), nullptr, nullptr));
  const auto user = user_of_local_peer(accepted.get());
  accepted = Descriptor();
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK(user == kNobody);
}

}  // namespace
}  // namespace telegrad::test
