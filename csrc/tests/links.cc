#include "tests/links.h"

#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <tuple>

#include "transports/tcp/laned_link.h"
#include "transports/tls/security.h"

namespace telegrad::test {

Outgoing Message::outgoing() const {
  Outgoing m;
  m.header = header;
  m.name = name;
  m.body = body;
  for (const std::string& s : segments) m.segments.push_back({reinterpret_cast<const std::byte*>(s.data()), s.size()});
  return m;
}

Message random_message(Random& random, std::size_t body, const std::vector<std::size_t>& segments, std::size_t name) {
  Message m;
  m.header.type = FrameType::kRequest;
  m.header.tag = static_cast<std::uint8_t>(random.next());
  m.header.flags = static_cast<std::uint16_t>(random.next() & ~std::uint64_t{kTrailer});
  m.header.name_id = static_cast<std::uint32_t>(random.next());
  m.header.call_id = random.next();
  m.header.timeout = static_cast<std::int64_t>(random.next());
  m.header.credit = random.next();
  m.name = random.bytes(name);
  m.body = random.bytes(body);
  for (std::size_t s : segments) m.segments.push_back(random.bytes(s));
  return m;
}

namespace {

void check_block(const std::string& sent, const BlockPtr& got) {
  CHECK(got != nullptr);
  CHECK_EQ(got->size(), sent.size());
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(got->data()) % kAlignment, 0u);
  CHECK(std::string_view(reinterpret_cast<const char*>(got->data()), got->size()) == sent);
}

}  // namespace

void check_same(const Message& sent, const Incoming& got) {
  CHECK(got.header.type == sent.header.type);
  CHECK_EQ(got.header.tag, sent.header.tag);
  CHECK_EQ(got.header.flags, sent.header.flags);
  CHECK_EQ(got.header.name_id, sent.header.name_id);
  CHECK_EQ(got.header.call_id, sent.header.call_id);
  CHECK_EQ(got.header.timeout, sent.header.timeout);
  CHECK_EQ(got.header.credit, sent.header.credit);
  CHECK(got.name_view() == sent.name);
  if (sent.body.empty()) {
    CHECK(got.body == nullptr);
  } else {
    check_block(sent.body, got.body);
  }
  CHECK_EQ(got.segments.size(), sent.segments.size());
  for (std::size_t i = 0; i < sent.segments.size(); ++i) check_block(sent.segments[i], got.segments[i]);
}

BlockPtr RecordingInbox::allocate(std::size_t size) {
  ++allocations;
  allocated += size;
  if (size >= refuse_from) throw std::bad_alloc();
  return pool->allocate(size);
}

LinkSecurityPtr security_for(const std::string& address) {
  if (!address.starts_with("tls")) return nullptr;
  static const LinkSecurityPtr kSecurity = make_tls({.key = std::string(32, 'k')});
  return kSecurity;
}

std::unique_ptr<Listener> listen_on(const std::string& address) {
  return find_transport(address)->listen(address, security_for(address));
}

std::unique_ptr<Link> connect_to(const std::string& address) {
  return find_transport(address)->connect(address, security_for(address));
}

std::string fresh_address(const std::string& scheme) {
  static std::atomic<int> count = 0;
  if (scheme == "tcp" || scheme == "lanes" || scheme == "tls-lanes") return "tcp:127.0.0.1:0";
  if (scheme == "tls") return "tls:127.0.0.1:0";
  const std::string name = "telegrad-test-" + std::to_string(getpid()) + "-" + std::to_string(++count);
  return scheme + (scheme == "inproc" ? ":" : ":@") + name;
}

bool polls(int fd, short events, int timeout_ms) {
  pollfd p{.fd = fd, .events = events, .revents = 0};
  while (true) {
    const int n = ::poll(&p, 1, timeout_ms);
    if (n >= 0) return n > 0;
  }
}

namespace {

/// Returns whether one of its lanes signals the event.
bool lanes_tell(const Link& link, short events) {
  epoll_event found[16];
  const int n = link.lanes_fd() < 0 ? 0 : epoll_wait(link.lanes_fd(), found, 16, 0);
  return std::any_of(found, found + std::max(n, 0), [&](const epoll_event& e) {
    const bool takes = e.events & EPOLLOUT, has = e.events & ~static_cast<std::uint32_t>(EPOLLOUT);
    return (takes && (events & POLLOUT)) || (has && (events & POLLIN));
  });
}

}  // namespace

bool polls(const Link& link, short events, int timeout_ms) {
  const Nanos until = timeout_ms < 0 ? kNever : now() + timeout_ms * kMillisecond;
  do {
    // Its lanes may keep signaling another event: poll them in between.
    const int slice = link.lanes_fd() < 0 ? timeout_ms : std::min(timeout_ms < 0 ? 1 : timeout_ms, 1);
    const bool lanes_only = events & POLLOUT && !link.waits_for_fd();
    const short wanted = lanes_only ? static_cast<short>(events & ~POLLOUT) : events;
    if (polls(link.fd(), wanted, slice) || lanes_tell(link, events)) return true;
  } while (now() < until);
  return false;
}

void wait_for_either(const Link& from, const Link& to) {
  const short writable = from.waits_for_fd() ? POLLIN | POLLOUT : POLLIN;
  pollfd p[4] = {{.fd = from.fd(), .events = writable, .revents = 0},
                 {.fd = from.lanes_fd(), .events = POLLIN, .revents = 0},
                 {.fd = to.fd(), .events = POLLIN, .revents = 0},
                 {.fd = to.lanes_fd(), .events = POLLIN, .revents = 0}};
  ::poll(p, 4, -1);
}

ReceiveState receive(Link& link, Inbox& inbox, std::size_t budget) {
  link.poll_lanes();
  const ReceiveState state = link.receive(inbox, budget);
  if (state != ReceiveState::kToSend) return state;
  link.flush();  // if it is blocked, the next send flushes the buffer
  return ReceiveState::kIdle;
}

Ends::Ends(const std::string& scheme) {
  listener = listen_on(fresh_address(scheme));
  if (scheme.ends_with("lanes")) {
    connect_lanes(scheme == "tls-lanes");
    return;
  }
  a = connect_to(listener->address());
  while (!b) {
    CHECK(readable(listener->fd()));
    b = listener->accept();
  }
  if (scheme == "tls") shake_hands(*a, *b);
}

void Ends::connect_lanes(bool encrypted) {
  static constexpr SocketKind kKind{.peer_credentials = remote_credentials};
  constexpr Striping kAll{.sizes = {.message = 1, .segment = 1, .fragment = 50'000}, .striped = 1, .measured = false};
  const auto link_over = [&](const Link& link, bool initiator) {
    UniqueFd socket(dup(link.fd()));
    auto stream = encrypted ? make_tls_stream(std::move(socket), security_for("tls:"), initiator)
                            : std::make_unique<ByteStream>(std::move(socket));
    return std::make_unique<LanedLink>(std::move(stream), "lanes", false, kKind, kAll);
  };
  auto both = [&] {
    auto out = connect_to(listener->address());
    std::unique_ptr<Link> in;
    do {
      readable(listener->fd());
      in = listener->accept();
    } while (!in);
    const Message m;
    Outgoing hello = m.outgoing();
    while (out->send(hello) == SendState::kBlocked) writable(out->fd());  // it is connected
    RecordingInbox inbox;
    receive_until(*in, inbox, 1);
    auto at_a = link_over(*out, true), at_b = link_over(*in, false);
    if (encrypted) shake_hands(*at_a, *at_b);
    return std::pair{std::move(at_a), std::move(at_b)};
  };
  std::tie(a, b) = both();
  for (int i = 0; i < 3; ++i) {
    auto [at_a, at_b] = both();
    CHECK(a->add_lane(std::move(at_a)));
    CHECK(b->add_lane(std::move(at_b)));
  }
}

void shake_hands(Link& a, Link& b) {
  Message m;
  m.header.type = FrameType::kOneway;
  RecordingInbox inbox;
  send_whole(a, m, b, inbox);
  receive_until(b, inbox, 1);
}

void send_whole(Link& from, const Message& message, Link& to, RecordingInbox& inbox) {
  Outgoing m = message.outgoing();
  send_whole(from, m, to, inbox);
}

void send_whole(Link& from, Outgoing& m, Link& to, RecordingInbox& inbox) {
  while (true) {
    const SendState state = from.send(m);
    if (state == SendState::kSent) return;
    if (state == SendState::kBroken) fail(__FILE__, __LINE__, "a send failed: " + from.error().text);
    wait_for_either(from, to);
    RecordingInbox nothing;
    if (readable(from, 0) && receive(from, nothing, kAnyBudget) == ReceiveState::kBroken)
      fail(__FILE__, __LINE__, "the sender's link broke: " + from.error().text);
    CHECK(nothing.messages.empty());
    if (readable(to, 0) && receive(to, inbox, kAnyBudget) == ReceiveState::kBroken)
      fail(__FILE__, __LINE__, "the receiver's link broke: " + to.error().text);
  }
}

void receive_until(Link& link, RecordingInbox& inbox, std::size_t count) {
  while (inbox.messages.size() < count) {
    readable(link);
    if (receive(link, inbox, kAnyBudget) == ReceiveState::kBroken) {
      CHECK_EQ(link.error().text + std::to_string(inbox.messages.size()) + " messages", std::to_string(count));
    }
  }
}

void receive_until_broken(Link& link, RecordingInbox& inbox) {
  do {
    readable(link);
  } while (receive(link, inbox, kAnyBudget) != ReceiveState::kBroken);
}

Clogged clog(Link& link, std::size_t size) {
  Clogged c;
  Random random(size);
  c.messages.reserve(4096);
  while (true) {
    CHECK(c.messages.size() < 4096);  // the link never blocks
    c.messages.push_back(random_message(random, 8, {size}));
    c.sent.push_back(std::make_unique<Outgoing>(c.messages.back().outgoing()));
    SendState state;
    // The kernel may still be moving bytes to the reader, so check again before the link counts as blocked.
    for (int turn = 0; (state = link.send(*c.sent.back())) == SendState::kBlocked; ++turn) {
      if (!writable(link, 20)) return c;
      CHECK(turn < 1000);  // the link polls writable but is blocked
    }
    CHECK(state == SendState::kSent);
  }
}

bool in_a_fork(const std::function<bool()>& check, const std::function<void()>& meanwhile) {
  int pipes[2];
  CHECK_EQ(::pipe(pipes), 0);
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    char go;
    const bool good = ::read(pipes[0], &go, 1) == 1 && check();
    ::_exit(good ? 0 : 1);
  }
  meanwhile();
  CHECK_EQ(::write(pipes[1], "!", 1), 1);
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  ::close(pipes[0]);
  ::close(pipes[1]);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace telegrad::test
