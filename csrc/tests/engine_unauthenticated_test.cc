// Unauthenticated connections are confined to the handshake, and members that send malformed frames are disconnected.
// The calls of other peers continue.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

/// A worker with a peer, and an unauthenticated link to it.
struct Stage {
  explicit Stage(Settings settings = {}) : a(0, std::move(settings)), b(1) {
    introduce({&a, &b}, "unix");
    CHECK_EQ(body_of(b.call(0, {.body = "x"})), "x");
  }
  std::unique_ptr<Link> knock() {
    const std::string address = a.address().addresses[0];
    return connect_to(address);
  }
  void check_well() { CHECK_EQ(body_of(b.call(0, {.body = "still here"})), "still here"); }
  Worker a, b;
};

void send(Link& link, const Message& m) {
  Outgoing out = m.outgoing();
  CHECK(link.send(out) == SendState::kSent);
}

Message request(std::string body) {
  Message m = message(FrameType::kRequest, std::move(body), 1);
  m.header.tag = kEcho;
  return m;
}

CASE(garbage_instead_of_a_handshake) {
  Stage s;
  for (const std::string& bytes :
       {std::string(1000, '\0'), std::string("GET / HTTP/1.1\r\n\r\n") + std::string(100, 'x')}) {
    auto link = s.knock();
    CHECK_EQ(::send(link->fd(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    RecordingInbox inbox;
    receive_until_broken(*link, inbox);
    CHECK(inbox.messages.empty());
  }
  CHECK_SAYS(s.a.wait_for_event(EventKind::kLog), "not a Telegrad frame");
  s.check_well();
}

CASE(a_request_before_the_handshake) {
  Stage s;
  const int handled = s.a.handled.value();
  for (const FrameType type : {FrameType::kRequest, FrameType::kReply, FrameType::kOneway, FrameType::kCredit,
                               FrameType::kGoodbye, FrameType{77}}) {
    auto link = s.knock();
    send(*link, message(type, "let me in", 1));
    RecordingInbox inbox;
    receive_until_broken(*link, inbox);
    CHECK(inbox.messages.empty());
  }
  CHECK_SAYS(s.a.wait_for_event(EventKind::kLog), "before it had proven its identity");
  s.check_well();
  CHECK_EQ(s.a.handled.value(), handled + 1);
}

CASE(an_unauthenticated_connection_gets_no_memory) {
  Stage s;
  auto link = s.knock();
  FrameHeader h;
  h.type = FrameType::kHello;
  h.body_size = kHandshakeLimits.body + 1;
  CHECK_EQ(::send(link->fd(), &h, sizeof h, 0), static_cast<ssize_t>(sizeof h));
  RecordingInbox inbox;
  receive_until_broken(*link, inbox);
  CHECK_SAYS(s.a.wait_for_event(EventKind::kLog), "over the limits");
  s.check_well();
}

CASE(a_silent_unauthenticated_connection_is_closed) {
  Settings s;
  s.handshake_timeout = 20 * kMillisecond;
  Stage stage(s);
  auto link = stage.knock();
  RecordingInbox inbox;
  receive_until_broken(*link, inbox);
  CHECK_SAYS(stage.a.wait_for_event(EventKind::kLog), "took too long");
  stage.check_well();
}

CASE(a_peer_that_never_answers_hello) {
  Settings s;
  s.handshake_timeout = 20 * kMillisecond;
  s.connect_timeout = 50 * kMillisecond;
  Worker a(0, s);
  Puppet p(1);  // listens and does nothing else
  a.engine->set_peer(p.address());
  const Completion o = a.call(1, {});
  CHECK(o.status == CallStatus::kUnreachable);
  CHECK_SAYS(o.why, "took too long");
  CHECK(o.loss == Loss::kOther);
  a.start(1, 1, {});
  a.completion_count.wait_for(1);
  CHECK_SAYS(a.completions.at(1).why, "took too long");
}

void check_not_lost(Worker& w) {
  std::lock_guard lock(w.mutex);
  for (const WorkItem& e : w.events) CHECK(e.event != EventKind::kPeerLost);
}

/// Accepts a connection and sends nothing until the other end closes it.
void ignore_one(Puppet& p, bool patiently = true) {
  RecordingInbox inbox;
  do {
    readable(p.listener->fd());
    p.link = p.listener->accept();
  } while (!p.link);
  if (patiently) receive_until_broken(*p.link, inbox);
  p.link.reset();
}

CASE(a_peer_that_answers_late_is_connected) {
  Settings s;
  s.handshake_timeout = 20 * kMillisecond;
  Worker a(0, s);
  Puppet p(1);
  a.engine->set_peer(p.address());
  std::string got;
  std::thread caller([&] { got = body_of(a.call(1, {.body = "x"})); });
  for (const bool patiently : {true, false, true}) ignore_one(p, patiently);
  p.accept();
  p.reply(p.receive(), "yes");
  caller.join();
  CHECK_EQ(got, "yes");
  check_not_lost(a);
}

/// A call fails after connect_timeout; messages that must be delivered are kept until there is a connection.
CASE(a_peer_not_connected_in_time_is_not_lost) {
  Settings s;
  s.handshake_timeout = 20 * kMillisecond;
  s.connect_timeout = 5 * kMillisecond;
  Worker a(0, s);
  Puppet p(1);
  a.engine->set_peer(p.address());
  Request news{.body = "news"};
  CHECK(a.engine->send(1, compose(news)));
  a.start(1, 1, {.body = "background", .background = true, .flags = kMustDeliver});
  for (const std::uint16_t flags : {std::uint16_t{0}, std::uint16_t{kMustDeliver}}) {
    const Completion o = a.call(1, {.body = flags ? "must" : "may", .segments = {"lent"}, .flags = flags});
    CHECK(o.status == CallStatus::kUnreachable);
    CHECK_SAYS(o.why, "no connection to worker w1");
  }
  ignore_one(p);
  p.accept();
  CHECK_EQ(std::string(p.receive().body_view()), "news");
  const Incoming background = p.receive(), must = p.receive();
  CHECK_EQ(std::string(background.body_view()), "background");
  CHECK_EQ(std::string(must.body_view()), "must");
  CHECK_EQ(std::string(reinterpret_cast<const char*>(must.segments[0]->data()), must.segments[0]->size()), "lent");
  p.reply(background, "done");
  a.completion_count.wait_for(1);
  CHECK_EQ(body_of(a.completions.at(1)), "done");
  check_not_lost(a);
}

CASE_ON_EVERY_SCHEME(the_wrong_secret) {
  Settings wrong = Worker::settings_of(1);
  wrong.handshake.secret = "another";
  Worker a(0), b(1, wrong), c(2);
  introduce({&a, &b, &c}, scheme);
  const Completion o = a.call(1, {});
  CHECK(o.status == CallStatus::kUnreachable);
  CHECK_SAYS(o.why, "refused by the peer, which logs the reason: this worker has another secret");
  CHECK(o.loss == Loss::kRefused);
  CHECK(b.call(0, {}).status == CallStatus::kUnreachable);
  CHECK_SAYS(a.wait_for_event(EventKind::kLog), "secret does not match");
  CHECK_EQ(a.handled.value(), 0);
  CHECK_EQ(b.handled.value(), 0);
  CHECK_EQ(body_of(a.call(2, {.body = "x"})), "x");
}

CASE(more_unauthenticated_connections_than_allowed) {
  Stage s;
  std::vector<std::unique_ptr<Link>> crowd;
  for (int i = 0; i < 200; ++i) crowd.push_back(s.knock());
  s.check_well();
  Worker c(2);
  c.meet(s.a);
  CHECK_EQ(body_of(c.call(0, {.body = "x"})), "x");
  crowd.clear();
  s.check_well();
}

/// Sets the soft limit of descriptors for its lifetime.
struct Descriptors {
  explicit Descriptors(rlim_t most) {
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    const rlimit now{.rlim_cur = std::min(before.rlim_max, most), .rlim_max = before.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &now), 0);
  }
  ~Descriptors() { setrlimit(RLIMIT_NOFILE, &before); }
  rlimit before;
};

/// Many silent connections cannot keep a member out: the oldest ones are closed.
CASE(unauthenticated_connections_do_not_block_a_member) {
  const Descriptors many(8192);
  Stage s;
  std::vector<std::unique_ptr<Link>> crowd;
  for (int i = 0; i < 1300; ++i) crowd.push_back(s.knock());
  Worker c(2);
  c.meet(s.a);
  CHECK_EQ(body_of(c.call(0, {.body = "x"})), "x");
  RecordingInbox inbox;
  receive_until_broken(*crowd.front(), inbox);
  CHECK_SAYS(s.a.wait_for_event(EventKind::kLog), "too many others");
  crowd.clear();
  s.check_well();
  s.a.stop();
  std::lock_guard lock(s.a.mutex);
  CHECK(s.a.events.size() <= 110);  // not one line for each of them
}

/// TCP connections to `to` from an address.
std::vector<UniqueFd> connect_from(const char* ip, const std::string& to, int count) {
  sockaddr_in from{}, at{};
  from.sin_family = at.sin_family = AF_INET;
  CHECK_EQ(inet_pton(AF_INET, ip, &from.sin_addr), 1);
  CHECK_EQ(inet_pton(AF_INET, "127.0.0.1", &at.sin_addr), 1);
  at.sin_port = htons(static_cast<std::uint16_t>(std::stoi(to.substr(to.rfind(':') + 1))));
  std::vector<UniqueFd> all;
  for (int i = 0; i < count; ++i) {
    UniqueFd s(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK_EQ(::bind(s.get(), reinterpret_cast<sockaddr*>(&from), sizeof from), 0);
    CHECK_EQ(::connect(s.get(), reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
    all.push_back(std::move(s));
  }
  return all;
}

CASE(a_connection_that_ends_at_once_is_not_logged) {
  Stage s;
  const std::string address = s.a.listen("tcp");
  const std::size_t before = s.a.engine->stats().connections;
  for (const bool reset : {false, true}) {
    auto socket = connect_from("127.0.0.1", address, 1);
    while (s.a.engine->stats().connections == before) std::this_thread::yield();
    const int hard[2] = {reset, 0};
    CHECK_EQ(setsockopt(socket[0].get(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard), 0);
    socket.clear();
    while (s.a.engine->stats().connections > before) std::this_thread::yield();
  }
  auto link = s.knock();
  CHECK_EQ(::send(link->fd(), std::string(100, 'x').data(), 100, 0), 100);
  CHECK_SAYS(s.a.wait_for_event(EventKind::kLog), "not a Telegrad frame");  // the first line
}

void check_ended(const UniqueFd& socket) {
  char byte;
  CHECK(readable(socket.get()));
  CHECK(::read(socket.get(), &byte, 1) <= 0);
}

/// An address has a fourth of the places, however many connections it makes; other addresses keep theirs.
CASE(one_address_has_a_share_of_the_places) {
  const Descriptors many(8192);
  Settings far;
  far.check_uid = false;  // treats the addresses as other machines
  Worker a(0, far);
  a.listen("tcp");
  const std::string at = a.address().addresses[0];
  const auto quiet = connect_from("127.0.0.3", at, 15);
  const auto crowd = connect_from("127.0.0.2", at, 300);
  for (std::size_t i = 0; i < crowd.size() - 16; ++i) check_ended(crowd[i]);
  CHECK_EQ(a.engine->stats().connections, 31u);
  CHECK(!readable(quiet.front().get(), 0));
  CHECK_SAYS(a.wait_for_event(EventKind::kLog), "refused a connection from 127.0.0.2 at");
  CHECK_EQ(a.event_count.value(), 1);  // not one line for each
}

/// Processes of the same user and host are not limited as one address.
CASE(processes_of_the_same_user_may_use_all_places) {
  const Descriptors many(8192);
  Worker a(0);
  a.listen("tcp");
  const auto crowd = connect_from("127.0.0.2", a.address().addresses[0], 74);
  for (std::size_t i = 0; i < 10; ++i) check_ended(crowd[i]);
  CHECK_EQ(a.engine->stats().connections, 64u);
}

/// Unauthenticated connections use at most one descriptor in eight.
CASE(unauthenticated_connections_have_a_share_of_the_descriptors) {
  Worker a(0);
  a.listen("unix");
  const std::string at = a.address().addresses[0];
  const Descriptors few(256);
  std::vector<std::unique_ptr<Link>> crowd;
  for (int i = 0; i < 60; ++i) crowd.push_back(connect_to(at));
  RecordingInbox inbox;
  receive_until_broken(*crowd[60 - 32 - 1], inbox);
  CHECK_EQ(a.engine->stats().connections, 32u);
}

/// If few descriptors are left, unauthenticated connections get none of them.
CASE(the_last_descriptors_are_for_the_program) {
  Worker a(0);
  a.listen("unix");
  const std::string at = a.address().addresses[0];
  const Descriptors few(256);
  std::vector<UniqueFd> held;
  while (held.empty() || held.back().get() < 256 - 32 - 2) held.emplace_back(dup(0));
  auto first = connect_to(at);
  RecordingInbox inbox;
  receive_until_broken(*first, inbox);
  CHECK_SAYS(a.wait_for_event(EventKind::kLog), "of the 256 descriptors of this process are in use: raise the limit");
  CHECK_EQ(a.engine->stats().connections, 0u);
}

CASE(no_descriptor_left_for_a_connection) {
  Stage s;
  RecordingInbox inbox, rehearsal;
  {  // the undefined-behavior sanitizer checks a type once, with a pipe
    Ends e("unix");
    e.a->close();
    receive_until_broken(*e.b, rehearsal);
  }
  std::vector<UniqueFd> held;
  auto few = std::make_unique<Descriptors>(256);
  while (true) {
    UniqueFd d(dup(0));
    if (!d) break;
    held.push_back(std::move(d));
  }
  held.pop_back();
  auto link = s.knock();  // takes the last one; none is left to accept it with
  receive_until_broken(*link, inbox);
  s.check_well();
  few.reset();
  Worker c(2);
  c.meet(s.a);
  CHECK_EQ(body_of(c.call(0, {.body = "x"})), "x");
}

/// A member that sends these bytes after the handshake is disconnected, and its callers get the reason.
void check_cut_off(const Message& bad, const std::string& why) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  Puppet p(2);
  a.engine->set_peer(p.address());
  Completion o;
  std::thread caller([&] { o = a.call(2, {}); });
  p.accept();
  p.receive();
  p.send(bad);
  caller.join();
  CHECK(o.status == CallStatus::kPeerLost);
  CHECK_SAYS(o.why, why);
  p.wait_for_end();
  CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost), why);
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  CHECK_EQ(a.handled.value(), 0);
}

CASE(a_member_that_sends_malformed_frames) {
  check_cut_off(message(FrameType{99}), "unknown type 99");
  check_cut_off(message(FrameType::kHello, "hello again"), "repeated the handshake");
  check_cut_off(message(FrameType{0}), "repeated the handshake");
  Message unnamed = request("x");
  unnamed.header.name_id = 7;
  check_cut_off(unnamed, "never defined");
  Message not_a_frame = request("x");
  not_a_frame.header.magic = 5;
  check_cut_off(not_a_frame, "not a Telegrad frame");
}

/// A member that ignores the limits of its receiver.
CASE(a_member_over_the_limits) {
  Settings small;
  small.handshake.limits.body = 1000;
  Worker a(0, small);
  a.listen("unix");
  Puppet p(1);
  p.connect(a.address());
  p.send(request(std::string(1000, 'x')));
  CHECK_EQ(p.receive().body_view().size(), 1000u);
  p.send(request(std::string(1001, 'x')));
  p.wait_for_end();
  CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost), "over the limits");
}

CASE(replies_without_a_request) {
  Worker a(0);
  a.listen("unix");
  Puppet p(1);
  p.connect(a.address());
  for (std::uint64_t call = 0; call < 100; ++call) p.send(message(FrameType::kReply, "x", call << 32 | (call + 1)));
  Message credit = message(FrameType::kCredit);
  credit.header.credit = UINT64_MAX;
  p.send(credit);
  Message timeless = request("x");
  timeless.header.timeout = INT64_MIN;
  p.send(timeless);
  CHECK_EQ(std::string(p.receive().body_view()), "x");
  timeless.header.timeout = INT64_MAX;
  p.send(timeless);
  CHECK_EQ(std::string(p.receive().body_view()), "x");
  CHECK_EQ(a.completion_count.value(), 0);
}

CASE(an_id_taken_by_another_name) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  Settings other = Worker::settings_of(1);
  other.handshake.me.name = "another-worker";
  Worker imposter(1, other);
  imposter.meet(a);
  const Completion o = imposter.call(0, {});
  CHECK(o.status != CallStatus::kReplied);
  CHECK_SAYS(a.wait_for_event(EventKind::kLog), "taken by another name");
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test
