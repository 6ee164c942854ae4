// Zero-copy return over shared-memory links: memory that arrived with one message goes back with another.
#include <cstdio>
#include <cstring>
#include <fstream>

#include "tests/links.h"
#include "tests/shm_pair.h"
#include "transports/shm/shm_link.h"

namespace telegrad::test {
namespace {

/// Bytes of shared memory that this process has mapped.
std::size_t mapped() {
  std::size_t bytes = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::size_t begin, end;
    if (line.find("/memfd:telegrad") == std::string::npos) continue;
    CHECK_EQ(std::sscanf(line.c_str(), "%zx-%zx", &begin, &end), 2);
    bytes += end - begin;
  }
  return bytes;
}

/// A pair in which `b` returns memory of `a`.
struct Home : Pair {
  Home() { warm_up(kMiB); }

  /// Returns a block, the whole or a part, with a message. True: `a` got it without a copy.
  bool return_block(const Block& block, std::size_t begin = 0, std::size_t size = kMiB) {
    Outgoing m;
    m.header.type = FrameType::kReply;
    m.segments.push_back({block.data() + begin, size, block.lease()});
    const int before = returned.allocations;
    const std::size_t count = returned.messages.size();
    while (ends.b->send(m) == SendState::kBlocked) receive(*ends.a, returned, kAnyBudget);
    receive_until(*ends.a, returned, count + 1);
    RecordingInbox nothing;
    receive(*ends.b, nothing, kAnyBudget);  // packets of `a` about its memory
    return returned.allocations == before && Lease::is_returned(m.segments[0].lease);
  }
  Block& returned_block(std::size_t i) { return *returned.messages[i].segments[0]; }
  std::string_view returned_text(std::size_t i) {
    return {reinterpret_cast<const char*>(returned_block(i).data()), returned_block(i).size()};
  }
  RecordingInbox returned;
};

CASE(received_memory_is_returned_without_a_copy) {
  Home h;
  const std::size_t before = h.ends.a->lease_capacity();
  for (int round = 0; round < 20; ++round) {
    CHECK(h.pass(std::string(kMiB, static_cast<char>('a' + round))));
    std::memset(h.block(0).data(), 'x', 10);
    CHECK(h.return_block(h.block(0)));
    h.inbox.messages.clear();
    CHECK(h.returned_text(0) == std::string(10, 'x') + std::string(kMiB - 10, static_cast<char>('a' + round)));
    std::memset(h.returned_block(0).data(), 'y', kMiB);  // the owner may write to it again
    h.returned.messages.clear();
  }
  CHECK_EQ(h.ends.a->lease_capacity(), before);
  CHECK_EQ(h.ends.b->lease_capacity(), 0u);  // it has no arena memory of its own
}

CASE(memory_is_returned_any_number_of_times) {
  Home h;
  h.warm_up(kPage * 8);
  for (std::uint64_t i = 0; i < ReleaseQueue::kSlots + 10; ++i) {  // more than may be passed on at the same time
    CHECK(h.pass(std::string(kPage * 8, 'a')));
    CHECK(h.return_block(h.block(0), 0, kPage * 8));
    h.inbox.messages.clear();
    h.returned.messages.clear();
  }
}

CASE(returned_memory_is_not_reused_while_it_is_held) {
  Home h;
  CHECK(h.pass(std::string(kMiB, 'a')));
  CHECK(h.return_block(h.block(0)));
  h.inbox.messages.clear();
  for (int i = 0; i < 5; ++i) CHECK(h.pass(std::string(kMiB, 'b')));
  CHECK(h.returned_text(0) == std::string(kMiB, 'a'));
  const std::byte* there = h.returned_block(0).data();
  h.returned.messages.clear();
  h.inbox.messages.clear();
  CHECK(h.pass(std::string(kMiB, 'c')));
  CHECK(h.return_block(h.block(0)));
  CHECK_EQ(h.returned_block(0).data(), there);  // reused after its release
}

CASE(a_part_of_a_region_is_returned) {
  Home h;
  CHECK(h.pass(std::string(kMiB / 2, 'a') + std::string(kMiB / 2, 'b')));
  CHECK(h.return_block(h.block(0), kMiB / 2, kMiB / 2));
  CHECK(h.returned_text(0) == std::string(kMiB / 2, 'b'));
  h.inbox.messages.clear();
  h.returned.messages.clear();
  CHECK(h.pass(std::string(kMiB, 'c')));
}

CASE(memory_that_cannot_be_returned_is_copied) {
  Home h, other;
  CHECK(h.pass(std::string(kMiB, 'a')));
  CHECK(other.pass(std::string(kMiB, 'o')));
  CHECK(!h.return_block(h.block(0), 1, kMiB - 1));  // not aligned for a tensor
  CHECK(!h.return_block(other.block(0)));           // memory of another link
  CHECK(!other.return_block(h.block(0)));
  CHECK(!h.return_block(h.block(0), 0, kMiB + 64));  // more than was received
  CHECK(h.return_block(h.block(0)));
  CHECK(!h.return_block(h.block(0)));  // returned already
  CHECK(h.returned_text(0) == std::string(kMiB - 1, 'a'));
  CHECK(h.returned_text(1) == std::string(kMiB, 'o'));
  CHECK(h.returned_text(4) == std::string(kMiB, 'a'));
}

CASE(memory_returned_over_another_link_is_copied) {
  Home h, other;
  for (Home* each : {&h, &other}) {
    CHECK(each->pass(std::string(kMiB, each == &h ? 'h' : 'o')));
    CHECK(each->return_block(each->block(0)));
    each->inbox.messages.clear();
  }
  for (auto [from, of] : {std::pair(&h, &other), std::pair(&other, &h)}) {
    CHECK_EQ(h.returned_block(0).lease(), other.returned_block(0).lease());
    Outgoing m;
    m.header.type = FrameType::kReply;
    m.segments.push_back({of->returned_block(0).data(), kMiB, of->returned_block(0).lease()});
    CHECK(from->ends.a->send(m) == SendState::kSent);
    receive_until(*from->ends.b, from->inbox, 1);
    CHECK(from->text(0) == std::string(kMiB, from == &h ? 'o' : 'h'));
  }
}

/// The message that returned a region may still exist when the same memory is passed on again.
CASE(a_region_passed_on_again_is_a_new_one) {
  Home h;
  CHECK(h.pass(std::string(kMiB, 'a')));
  CHECK(h.return_block(h.block(0)));
  h.returned.messages.clear();
  CHECK(h.pass(std::string(kMiB, 'b')));
  CHECK_EQ(h.block(1).data(), h.block(0).data());
  h.inbox.messages.erase(h.inbox.messages.begin());  // returns nothing
  CHECK(h.text(0) == std::string(kMiB, 'b'));
  CHECK(h.return_block(h.block(0)));
  CHECK(h.returned_text(0) == std::string(kMiB, 'b'));
  h.inbox.messages.clear();
  for (int i = 0; i < 3; ++i) CHECK(h.pass(std::string(kMiB, 'c')));
}

CASE(leased_memory_can_be_passed_on_again_after_its_return) {
  Home h;
  LinkLease leased = *h.ends.a->lease(kMiB);
  const std::byte* data = leased.memory->data();
  auto give = [&](const Block& block, std::uint64_t lease) {
    Outgoing m;
    m.header.type = FrameType::kReply;
    m.segments.push_back({block.data(), kMiB, lease});
    CHECK(h.ends.a->send(m) == SendState::kSent);
    receive_until(*h.ends.b, h.inbox, 1);
    return m.segments[0].lease != 0;
  };
  std::memset(leased.memory->data(), 'l', kMiB);
  CHECK(give(*leased.memory, leased.lease));
  CHECK(h.return_block(h.block(0)));  // while the first message still exists
  leased.memory.reset();
  CHECK_EQ(h.returned_block(0).data(), data);
  h.inbox.messages.clear();
  CHECK(h.pass(std::string(kMiB, 'o')));  // uses another region
  CHECK(h.returned_text(0) == std::string(kMiB, 'l'));
  h.inbox.messages.clear();
  std::memset(h.returned_block(0).data(), 'm', kMiB);
  CHECK(give(h.returned_block(0), h.returned_block(0).lease()));
  h.returned.messages.clear();
  CHECK(h.text(0) == std::string(kMiB, 'm'));
  h.inbox.messages.clear();
  CHECK_EQ(h.ends.a->lease(kMiB)->memory->data(), data);
}

CASE(parent_and_child_have_separate_copies_of_returned_memory) {
  Home h;
  CHECK(h.pass(std::string(kMiB, 'a')));
  CHECK(h.return_block(h.block(0)));
  h.inbox.messages.clear();
  std::byte* data = h.returned_block(0).data();
  CHECK(in_a_fork(
      [&] {
        const bool same = h.returned_text(0) == std::string(kMiB, 'a');
        std::memset(data, 'c', kMiB);  // the child's copy
        h.returned.messages.clear();   // which the child must not free
        return same;
      },
      [&] { std::memset(data, 'b', kMiB); }));
  CHECK(in_a_fork([&] { return h.returned_text(0) == std::string(kMiB, 'b'); }, [] {}));
  CHECK(h.returned_text(0) == std::string(kMiB, 'b'));
  h.returned.messages.clear();
  for (int i = 0; i < 3; ++i) CHECK(h.pass(std::string(kMiB, static_cast<char>('0' + i))));
}

CASE(memory_made_private_by_a_fork_is_copied) {
  Home h;
  CHECK(h.pass(std::string(kMiB, 'a')));
  CHECK(in_a_fork([&] { return h.text(0) == std::string(kMiB, 'a'); },
                  [&] { std::memset(h.block(0).data(), 'b', kMiB); }));
  CHECK(!h.return_block(h.block(0)));
  CHECK(h.returned_text(0) == std::string(kMiB, 'b'));
}

CASE(returned_memory_outlives_its_link) {
  const int descriptors = open_descriptors();
  BlockPtr kept, theirs;
  LinkLease given;
  {
    Home h;
    h.warm_up(20 * kMiB);  // in a chunk of its own
    given = *h.ends.a->lease(20 * kMiB);
    Outgoing m;
    m.header.type = FrameType::kRequest;
    m.segments.push_back({given.memory->data(), 20 * kMiB, given.lease});
    CHECK(h.ends.a->send(m) == SendState::kSent);
    receive_until(*h.ends.b, h.inbox, 1);
    theirs = std::move(h.inbox.messages[0].segments[0]);
    h.inbox.messages.clear();
    CHECK(h.pass(std::string(kMiB, 'a')));
    CHECK(h.pass(std::string(kMiB, 'b')));
    CHECK(h.return_block(h.block(0)));
    kept = std::move(h.returned.messages[0].segments[0]);
    h.returned.messages.clear();
  }
  theirs.reset();
  CHECK(mapped() >= 28 * kMiB);
  given.memory.reset();
  CHECK(mapped() <= 9 * kMiB);  // the chunk that contains it
  CHECK_EQ(open_descriptors(), descriptors);
  std::memset(kept->data(), 'k', kMiB / 2);
  CHECK(in_a_fork([&] { return static_cast<char>(kept->data()[0]) == 'k'; },
                  [&] { std::memset(kept->data(), 'p', kMiB); }));
  CHECK(static_cast<char>(kept->data()[kMiB - 1]) == 'p');
  kept.reset();
  CHECK_EQ(mapped(), 0u);
}

}  // namespace
}  // namespace telegrad::test
