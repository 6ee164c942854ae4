// Messages over the limits of their receiver: an error of that call only.
#include "core/left_out.h"
#include "tests/workers.h"

namespace telegrad::test {
namespace {

constexpr std::size_t kBody = 70'000, kSegments = 80'000;

Settings with_limits() {
  Settings s;
  s.handshake.limits.body = kBody;
  s.handshake.limits.message = kSegments;
  s.handshake.limits.segments = 5;
  s.handshake.limits.name = 100;
  return s;
}

std::string bytes(std::size_t size) { return std::string(size, 'x'); }

struct Large {
  Request request;
  std::vector<std::string> why;
};

/// A request over each of the limits, and a part of its error text.
std::vector<Large> large_requests() {
  std::vector<Large> all;
  all.push_back({{.body = bytes(kBody + 1)}, {"70001", "70000", "max_header_bytes", "w1"}});
  all.push_back({{.segments = {bytes(40'000), bytes(40'001)}}, {"80001", "80000", "max_message_bytes", "w1"}});
  all.push_back({{.segments = {"", "", "", "", "", ""}}, {"6 tensors", "5", "w1"}});
  all.push_back({{.name_id = 1, .name = bytes(101)}, {"101", "100", "w1"}});
  return all;
}

void check_too_large(const Completion& o, const std::vector<std::string>& why) {
  CHECK(o.status == CallStatus::kTooLarge);
  for (const std::string& part : why) CHECK_SAYS(o.why, part);
}

CASE_ON_EVERY_SCHEME(a_request_over_the_limits_fails_alone) {
  Worker a(0), b(1, with_limits());
  introduce({&a, &b}, scheme);
  a.start(1, 1, {.tag = kHold, .body = "meanwhile"});
  b.handled.wait_for(1);
  for (Large& l : large_requests()) check_too_large(a.call(1, std::move(l.request)), l.why);
  int target = 10;
  for (Large& l : large_requests()) {
    l.request.keep_alive = std::make_unique<Bytes>();
    a.start(1, ++target, std::move(l.request));
    a.completion_count.wait_for(target - 10);
    check_too_large(a.completions.at(target), l.why);
  }
  CHECK(text_of(a.call(1, {.segments = {bytes(kSegments)}}).reply.segments[0]) == bytes(kSegments));
  CHECK_EQ(body_of(a.call(1, {.body = bytes(kBody)})).size(), kBody);
  b.release.set();
  a.completion_count.wait_for(5);
  CHECK_EQ(body_of(a.completions.at(1)), "meanwhile");
  CHECK_EQ(a.event_count.value() + b.event_count.value(), 0);
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

/// The limits of a worker are unknown before there is a connection to it.
CASE(a_request_that_waits_for_a_connection_may_be_too_large) {
  for (const bool async : {true, false}) {
    for (Large& l : large_requests()) {
      Worker a(0), b(1, with_limits());
      introduce({&a, &b}, "unix");
      if (async) {
        a.start(1, 1, std::move(l.request));
        a.completion_count.wait_for(1);
        check_too_large(a.completions.at(1), l.why);
      } else {
        check_too_large(a.call(1, std::move(l.request)), l.why);
      }
      CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
      CHECK_EQ(b.handled.value(), 1);
    }
  }
}

/// A message that both ends count on is delivered without its content, and the receiver answers.
CASE_ON_EVERY_SCHEME(a_request_that_must_be_delivered_is_sent_without_its_content) {
  for (const bool linked : {true, false}) {
    Worker a(0), b(1, with_limits());
    introduce({&a, &b}, scheme);
    b.on_custom = [&](WorkItem& item) {
      CHECK(item.message.header.flags & kLeftOut);
      CHECK(item.name == nullptr);
      CHECK_EQ(item.message.segments.size(), 1u);
      CHECK_EQ(text_of(item.message.segments[0]), "the trailer");
      CHECK_EQ(item.message.body_view().front(), static_cast<char>(LeftOut::kTooLarge));
      b.answer(item, std::string(item.message.body_view().substr(1)));
    };
    if (linked) CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
    for (Large& l : large_requests()) {
      l.request.tag = kCustom;
      l.request.flags = kMustDeliver | kTrailer;
      l.request.segments.push_back("the trailer");
      const std::string answer = body_of(a.call(1, std::move(l.request)));
      CHECK_SAYS(answer, l.why[0] == "6 tensors" ? "7 tensors" : l.why[0]);
      CHECK_SAYS(answer, l.why[1]);
    }
    CHECK_EQ(a.event_count.value() + b.event_count.value(), 0);
  }
}

CASE_ON_EVERY_SCHEME(a_reply_over_the_limits_is_sent_without_its_content) {
  Worker a(0, with_limits()), b(1);
  b.on_custom = [&](WorkItem& item) {
    b.answer(item, "x", {bytes(kSegments + 1), "the trailer"}, kMustDeliver | kTrailer);
  };
  introduce({&a, &b}, scheme);
  for (const bool body : {true, false}) {
    const Completion o = body ? a.call(1, {.body = bytes(kBody + 1)}) : a.call(1, {.segments = {bytes(kSegments + 1)}});
    CHECK(o.status == CallStatus::kReplied);
    CHECK(o.reply.header.flags & kLeftOut);
    CHECK(o.reply.segments.empty());
    CHECK_EQ(body_of(o).front(), static_cast<char>(LeftOut::kTooLarge));
    CHECK_SAYS(body_of(o), body ? "max_header_bytes of worker w0" : "max_message_bytes of worker w0");
  }
  const Completion o = a.call(1, {.tag = kCustom});
  CHECK(o.reply.header.flags & kLeftOut && o.reply.header.flags & kMustDeliver);
  CHECK_EQ(o.reply.segments.size(), 1u);
  CHECK_EQ(text_of(o.reply.segments[0]), "the trailer");
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  CHECK_EQ(a.event_count.value() + b.event_count.value(), 0);
}

CASE(one_way_messages_over_the_limits_are_not_sent) {
  Worker a(0), b(1, with_limits());
  introduce({&a, &b}, "unix");
  const auto large = [] {
    Request r{.tag = kCustom, .body = bytes(kBody + 1)};
    return compose(r);
  };
  CHECK(a.engine->send(1, large()));  // there is no connection yet
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  CHECK_SAYS(a.wait_for_event(EventKind::kLog), "max_header_bytes");
  CHECK(!a.engine->send(1, large()));
  CHECK_EQ(body_of(a.call(1, {.body = "y"})), "y");
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test
