#include "tests/links.h"

#include <unistd.h>

#include <atomic>

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
  m.header.flags = static_cast<std::uint16_t>(random.next());
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
  CHECK(got.name == sent.name);
  if (sent.body.empty()) {
    CHECK(got.body == nullptr);
  } else {
    check_block(sent.body, got.body);
  }
  CHECK_EQ(got.segments.size(), sent.segments.size());
  for (std::size_t i = 0; i < sent.segments.size(); ++i) check_block(sent.segments[i], got.segments[i]);
}

BlockPtr Collector::allocate(std::size_t size) {
  ++allocations;
  allocated += size;
  if (size >= refuse_from) throw std::bad_alloc();
  return pool->allocate(size);
}

std::string fresh_address(const std::string& scheme) {
  static std::atomic<int> count = 0;
  if (scheme == "tcp") return "tcp:127.0.0.1:0";
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

Ends::Ends(const std::string& scheme) {
  const std::string address = fresh_address(scheme);
  Transport* transport = find_transport(address);
  CHECK(transport != nullptr);
  listener = transport->listen(address);
  a = transport->connect(listener->address());
  while (!b) {
    CHECK(readable(listener->fd()));
    b = listener->accept();
  }
}

void send_whole(Link& from, const Message& message, Link& to, Collector& inbox) {
  Outgoing m = message.outgoing();
  while (true) {
    const SendState state = from.send(m);
    if (state == SendState::kSent) return;
    if (state == SendState::kBroken) fail(__FILE__, __LINE__, "a send failed: " + from.error());
    pollfd p[2] = {{.fd = from.fd(), .events = POLLOUT, .revents = 0}, {.fd = to.fd(), .events = POLLIN, .revents = 0}};
    ::poll(p, 2, -1);
    if (p[1].revents) CHECK(to.receive(inbox, kAnyBudget) != ReceiveState::kBroken);
  }
}

void receive_until(Link& link, Collector& inbox, std::size_t count) {
  while (inbox.messages.size() < count) {
    readable(link.fd());
    if (link.receive(inbox, kAnyBudget) == ReceiveState::kBroken) {
      CHECK_EQ(link.error() + std::to_string(inbox.messages.size()) + " messages", std::to_string(count));
    }
  }
}

void receive_until_broken(Link& link, Collector& inbox) {
  do {
    readable(link.fd());
  } while (link.receive(inbox, kAnyBudget) != ReceiveState::kBroken);
}

Clogged clog(Link& link, std::size_t size) {
  Clogged c;
  Random random(size);
  c.messages.reserve(4096);
  while (true) {
    CHECK(c.messages.size() < 4096);  // it takes anything
    c.messages.push_back(random_message(random, 8, {size}));
    c.sent.push_back(std::make_unique<Outgoing>(c.messages.back().outgoing()));
    SendState state;
    // The kernel may still be moving bytes towards the reader: blocked is what stays blocked.
    for (int turn = 0; (state = link.send(*c.sent.back())) == SendState::kBlocked; ++turn) {
      if (!writable(link.fd(), 20)) return c;
      CHECK(turn < 1000);  // it says it is writable, and is not
    }
    CHECK(state == SendState::kSent);
  }
}

}  // namespace telegrad::test
