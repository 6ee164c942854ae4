// Bytes before authentication, at either end of an encrypted connection: an attacker without the key.
//
// Input: flags, size of the pieces, then the bytes. Nothing is delivered, and the link is not established.
#include <sys/socket.h>

#include <string>

#include "fuzz/inbox.h"
#include "fuzz/input.h"
#include "transports/stream/stream_link.h"
#include "transports/tls/security.h"

namespace telegrad::fuzz {
namespace {

enum Flags : std::uint8_t { kInitiator = 1, kSends = 2, kEnds = 4 };

PeerCredentials remote_credentials(int, CredentialLookup&) { return {.kind = PeerCredentials::Kind::kRemote}; }
constexpr SocketKind kKind{.peer_credentials = remote_credentials};
constexpr std::size_t kMostSent = 16 << 10;

std::size_t read_available(int fd) {
  char bytes[4096];
  std::size_t size = 0;
  for (ssize_t n; (n = ::recv(fd, bytes, sizeof bytes, MSG_DONTWAIT)) > 0;) size += static_cast<std::size_t>(n);
  return size;
}

void run(Input in) {
  static const LinkSecurityPtr security = make_tls({.key = std::string(32, 'k')});
  const std::uint8_t flags = in.byte();
  const std::size_t piece = in.number<std::uint16_t>();
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "there are sockets");
  UniqueFd attacker(ends[0]);
  StreamLink link(make_tls_stream(UniqueFd(ends[1]), security, flags & kInitiator), "fuzzed", false, kKind);
  link.set_limits(kHandshakeLimits);
  SmallInbox inbox(1 << 20);
  Outgoing hello;
  hello.header.type = FrameType::kHello;
  hello.body = "the greeting of a worker";
  const bool sends = flags & kInitiator || flags & kSends;
  bool broken = sends && link.send(hello) == SendState::kBroken;
  std::size_t sent = read_available(attacker.get());
  for (std::string_view rest = in.rest(); !rest.empty() && !broken;) {
    const std::string_view next = rest.substr(0, piece == 0 ? rest.size() : piece);
    if (::send(attacker.get(), next.data(), next.size(), MSG_NOSIGNAL) < 0) break;
    rest.remove_prefix(next.size());
    broken = link.receive(inbox, std::size_t{1} << 20) == ReceiveState::kBroken;
    if (!broken && sends) broken = link.send(hello) == SendState::kBroken;
    sent += read_available(attacker.get());
  }
  if (flags & kEnds) {
    attacker = UniqueFd();
    while (link.receive(inbox, std::size_t{1} << 20) != ReceiveState::kBroken) {
    }
  }
  require(inbox.messages.empty(), "nothing is delivered without the key");
  require(sent <= kMostSent, "an attacker gets few bytes");
}

}  // namespace
}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::run({data, size});
  return 0;
}
