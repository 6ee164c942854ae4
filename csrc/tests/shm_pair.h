// Two ends of a shared-memory link, and large segments from the first to the second.
#pragma once

#include <string>
#include <string_view>

#include "tests/links.h"

namespace telegrad::test {

/// Sends one large segment from `a` to `b`; `allocations` of the inbox shows whether `b` copied it.
struct Pair {
  explicit Pair(std::uint64_t limit = std::uint64_t{1} << 30) : ends("shm") {
    for (Link* link : {ends.a.get(), ends.b.get()}) link->set_limits({.leased = limit});
  }
  /// Returns whether it is in the sender's arena.
  bool pass(const std::string& bytes) {
    Message m;
    m.header.type = FrameType::kRequest;
    m.segments.push_back(bytes);
    const int before = inbox.allocations;
    const std::size_t count = inbox.messages.size();
    send_whole(*ends.a, m, *ends.b, inbox);
    receive_until(*ends.b, inbox, count + 1);
    RecordingInbox nothing;
    receive(*ends.a, nothing, kAnyBudget);  // packets of `b` about its memory
    CHECK(text(count) == bytes);
    return inbox.allocations == before;
  }
  /// Passes such segments until one is in the arena.
  void warm_up(std::size_t size) {
    for (int i = 0; !pass(std::string(size, 'w')); ++i) CHECK(i < 100);
    inbox.messages.clear();
  }
  Block& block(std::size_t i) { return *inbox.messages[i].segments[0]; }
  std::string_view text(std::size_t i) { return {reinterpret_cast<const char*>(block(i).data()), block(i).size()}; }
  Ends ends;
  RecordingInbox inbox;
};

}  // namespace telegrad::test
