// Attempts to continue a session, made frame by frame: what a worker accepts, and what it takes for a sign of life.
#include <algorithm>

#include "tests/links.h"
#include "tests/workers.h"

namespace telegrad::test {
namespace {

Settings resuming(int id, Nanos heartbeat) {
  Settings s = Worker::settings_of(id);
  s.handshake.resume = true;
  s.heartbeat = heartbeat;
  return s;
}

/// Attempts of a puppet to continue its session with a worker.
struct Attempts {
  struct Result {
    FrameType type;
    OfferAnswer answer;
    bool operator==(const Result&) const = default;
  };
  Result attempt(const std::string& secret, std::uint64_t number, const std::string& link_name) {
    HandshakeConfig config = p.config;
    config.secret = secret;
    link = connect_to(a.address().addresses[0]);
    Handshake handshake = Handshake::initiate(config, a.address().identity, {.number = number, .previous = {}},
                                              Purpose::kResume, link_name);
    inbox = {};
    const auto send = [&](const Handshake::Step& step) {
      const Message m = message(*step.send, step.body);
      Outgoing out = m.outgoing();
      while (link->send(out) == SendState::kBlocked) writable(link->fd());
    };
    send(handshake.begin());
    for (std::size_t n = 0;; ++n) {
      receive_until(*link, inbox, n + 1);
      const Incoming& m = inbox.messages[n];
      if (m.header.type == FrameType::kRefuse || m.header.type == FrameType::kWelcome) {
        handshake.on_frame(m.header.type, m.body_view());
        return {m.header.type, handshake.answer()};
      }
      Handshake::Step step = handshake.on_frame(m.header.type, m.body_view());
      if (step.proven) step = handshake.proceed(0);
      send(step);
    }
  }
  Worker& a;
  Puppet& p;
  std::unique_ptr<Link> link;  // of the last attempt
  RecordingInbox inbox;        // what has arrived on it
  auto pings() const {
    return std::ranges::count(inbox.messages, FrameType::kPing, [](const Incoming& m) { return m.header.type; });
  }
};

/// An unauthenticated connection, or an old attempt, does not touch a session, although it names its link.
CASE(a_continuation_needs_the_secret_and_the_newest_number) {
  Worker a(0, resuming(0, 60 * kSecond));
  a.listen("tcp");
  Puppet p(1, "tcp");
  p.config.resume = true;
  p.connect(a.address());
  Attempts with{a, p, nullptr, {}};
  using Result = Attempts::Result;
  const std::string secret = p.config.secret;
  CHECK(with.attempt("another secret", 1, p.link_name).type == FrameType::kRefuse);
  CHECK((with.attempt(secret, 1, std::string(32, 'x')) == Result{FrameType::kRefuse, OfferAnswer::kEnded}));
  Message request = message(FrameType::kRequest, "y", 1);
  request.header.tag = kEcho;
  p.send(request);
  CHECK_EQ(std::string(p.receive().body_view()), "y");  // on its first connection
  CHECK(with.attempt(secret, 2, p.link_name).type == FrameType::kWelcome);
  CHECK((with.attempt(secret, 2, p.link_name) == Result{FrameType::kRefuse, OfferAnswer::kOutdated}));
  CHECK((with.attempt(secret, 1, p.link_name) == Result{FrameType::kRefuse, OfferAnswer::kOutdated}));
  std::lock_guard lock(a.mutex);
  for (const WorkItem& event : a.events) CHECK(event.event == EventKind::kLog);  // about that connection
}

/// A path that passes handshakes and nothing else, as one that loses large packets, does not keep a session.
CASE(a_session_that_only_shakes_hands_is_lost) {
  const Nanos interval = 400 * kMillisecond;
  Worker a(0, resuming(0, interval));
  a.listen("tcp");
  Puppet p(1, "tcp");
  p.config.resume = true;
  p.connect(a.address());
  const Nanos start = now();
  Attempts with{a, p, nullptr, {}};
  CHECK(p.receive().header.type == FrameType::kPing);  // after half an interval
  CHECK(with.attempt(p.config.secret, 1, p.link_name).type == FrameType::kWelcome);
  while (with.pings() < 2)  // the first one again, and another after one and a half
    receive_until(*with.link, with.inbox, with.inbox.messages.size() + 1);
  CHECK(now() - start < 2 * interval);
  CHECK(with.attempt(p.config.secret, 2, p.link_name).type == FrameType::kWelcome);
  receive_until_broken(*with.link, with.inbox);  // after two and a half
  CHECK_EQ(with.pings(), 2);
  CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost), "no sign of life");
}

}  // namespace
}  // namespace telegrad::test
