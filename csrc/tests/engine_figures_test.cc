// Figures of limits in a snapshot: unauthenticated connections, sizes of messages, names, unacknowledged copies.
#include "tests/overload_helpers.h"

namespace telegrad::test {
namespace {

CASE(unauthenticated_connections_are_counted) {
  Worker a(0, with_load({.unauthenticated = 3}));
  a.listen("unix");
  std::vector<std::unique_ptr<Link>> unauthenticated;
  const auto connect = [&] {
    unauthenticated.push_back(find_transport(a.address().addresses[0])->connect(a.address().addresses[0], nullptr));
  };
  for (int i = 0; i < 3; ++i) connect();
  while (limit(a, "max_unauthenticated").used < 3) std::this_thread::yield();
  CHECK_EQ(limit(a, "max_unauthenticated").limit, 3u);
  CHECK_EQ(limit(a, "max_unauthenticated").refused, 0u);
  connect();  // displaces the first
  while (limit(a, "max_unauthenticated").refused < 1) std::this_thread::yield();
  while (limit(a, "max_unauthenticated").used > 3) std::this_thread::yield();
  CHECK_EQ(limit(a, "max_unauthenticated").used, 3u);
  Puppet member(1);
  member.connect(a.address());
  CHECK_EQ(limit(a, "max_unauthenticated").refused, 2u);
  while (limit(a, "max_unauthenticated").used > 2) std::this_thread::yield();  // the member has proven itself
}

CASE_ON_EVERY_SCHEME(the_largest_message_is_shown) {
  Settings small;
  small.handshake.limits.body = 10'000;
  small.handshake.limits.message = 20'000;
  Worker a(0), b(1, small);
  introduce({&a, &b}, scheme);
  a.call(1, {.body = std::string(5'000, 'x'), .segments = {std::string(7'000, 'y'), std::string(8'000, 'z')}});
  a.call(1, {.body = "x"});
  CHECK_EQ(limit(b, "max_header_bytes").used, 5'000u);
  CHECK_EQ(limit(b, "max_header_bytes").limit, 10'000u);
  CHECK_EQ(limit(b, "max_message_bytes").used, 15'000u);
  CHECK_EQ(limit(b, "max_message_bytes").limit, 20'000u);
  CHECK_EQ(limit(a, "max_message_bytes").used, 15'000u);  // of the reply
  CHECK(a.call(1, {.body = std::string(10'001, 'x')}).status == CallStatus::kTooLarge);
  CHECK(a.call(1, {.segments = {std::string(20'001, 'x')}}).status == CallStatus::kTooLarge);
  b.start(0, 1, {.body = "x"});
  b.completion_count.wait_for(1);
  CHECK_EQ(limit(a, "max_header_bytes").refused, 1u);
  CHECK_EQ(limit(a, "max_message_bytes").refused, 1u);
  {
    std::lock_guard lock(a.mutex);
    a.on_custom = [&](WorkItem& item) { a.answer(item, std::string(10'001, 'x')); };
  }
  b.call(0, {.tag = kCustom});
  CHECK_EQ(limit(a, "max_header_bytes").refused, 2u);
  CHECK_EQ(limit(b, "max_header_bytes").refused, 0u);
}

CASE_ON_EVERY_SCHEME(names_are_counted_at_both_ends) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  for (int round = 0; round < 2; ++round) {
    for (std::uint32_t id = 1; id <= 5; ++id) a.call(1, {.name_id = id, .name = "name" + std::to_string(id)});
  }
  CHECK_EQ(limit(a, "interned_names").used, 5u);
  CHECK_EQ(limit(b, "interned_names").used, 5u);
  CHECK_EQ(limit(a, "interned_names").limit, std::uint64_t{kMaxNames});
  CHECK_EQ(limit(a, "interned_names").refused, 0u);
  a.call(1, {.name_id = kMaxNames + 7, .name = "further"});
  a.call(1, {.name_id = kMaxNames + 7, .name = "further"});
  CHECK_EQ(limit(a, "interned_names").refused, 2u);
  CHECK_EQ(limit(a, "interned_names").used, 5u);
}

CASE(copies_without_an_acknowledgement_are_counted) {
  Settings first = Worker::settings_of(0), second = Worker::settings_of(1);
  first.handshake.resume = second.handshake.resume = true;
  Worker a(0, first), b(1, second);
  introduce({&a, &b}, "tcp");
  CHECK_EQ(limit(a, "unacknowledged_bytes").used, 0u);
  for (int i = 0; i < 3; ++i) a.call(1, {.body = std::string(5'000, 'x')});
  CHECK(limit(a, "unacknowledged_bytes").used >= 15'000u);
  CHECK_EQ(limit(a, "unacknowledged_bytes").limit, kMaxUnacknowledged);
  for (int i = 0; i < 1000; ++i) a.call(1, {.body = std::string(5'000, 'x')});
  CHECK(limit(a, "unacknowledged_bytes").used < 1'000'000u);
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test
