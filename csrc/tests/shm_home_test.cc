// Memory that was handed over and goes home with a message, over shared-memory links.
#include <cstdio>
#include <cstring>
#include <fstream>

#include "tests/links.h"
#include "tests/shm_pair.h"
#include "transports/shm.h"

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

/// A pair of which `b` sends to `a` what it has of it.
struct Home : Pair {
  Home() { warm_up(kMiB); }

  /// Sends what a block holds, the whole or a part. True: `a` got it without a copy.
  bool send_home(const Block& block, std::size_t begin = 0, std::size_t size = kMiB) {
    Outgoing m;
    m.header.type = FrameType::kReply;
    m.segments.push_back({block.data() + begin, size, block.lease()});
    const int before = at_home.allocations;
    const std::size_t count = at_home.messages.size();
    while (ends.b->send(m) == SendState::kBlocked) receive(*ends.a, at_home, kAnyBudget);
    receive_until(*ends.a, at_home, count + 1);
    Collector nothing;
    receive(*ends.b, nothing, kAnyBudget);  // what `a` says of memory
    return at_home.allocations == before && Lease::goes_home(m.segments[0].lease);
  }
  Block& home(std::size_t i) { return *at_home.messages[i].segments[0]; }
  std::string_view home_text(std::size_t i) { return {reinterpret_cast<const char*>(home(i).data()), home(i).size()}; }
  Collector at_home;
};

CASE(what_came_goes_home_as_it_is) {
  Home h;
  const std::size_t before = h.ends.a->lendable();
  for (int round = 0; round < 20; ++round) {
    CHECK(h.pass(std::string(kMiB, static_cast<char>('a' + round))));
    std::memset(h.block(0).data(), 'x', 10);
    CHECK(h.send_home(h.block(0)));
    h.inbox.messages.clear();
    CHECK(h.home_text(0) == std::string(10, 'x') + std::string(kMiB - 10, static_cast<char>('a' + round)));
    std::memset(h.home(0).data(), 'y', kMiB);  // who has it now may write to it
    h.at_home.messages.clear();
  }
  CHECK_EQ(h.ends.a->lendable(), before);
  CHECK_EQ(h.ends.b->lendable(), 0u);  // it has made no memory of its own
}

CASE(there_is_no_end_to_it) {
  Home h;
  h.warm_up(kPage * 8);
  for (std::uint64_t i = 0; i < Returns::kSlots + 10; ++i) {  // more than can be out at once
    CHECK(h.pass(std::string(kPage * 8, 'a')));
    CHECK(h.send_home(h.block(0), 0, kPage * 8));
    h.inbox.messages.clear();
    h.at_home.messages.clear();
  }
}

CASE(what_is_home_is_not_used_for_others) {
  Home h;
  CHECK(h.pass(std::string(kMiB, 'a')));
  CHECK(h.send_home(h.block(0)));
  h.inbox.messages.clear();
  for (int i = 0; i < 5; ++i) CHECK(h.pass(std::string(kMiB, 'b')));
  CHECK(h.home_text(0) == std::string(kMiB, 'a'));
  const std::byte* there = h.home(0).data();
  h.at_home.messages.clear();
  h.inbox.messages.clear();
  CHECK(h.pass(std::string(kMiB, 'c')));
  CHECK(h.send_home(h.block(0)));
  CHECK_EQ(h.home(0).data(), there);  // once it is let go of, it is
}

CASE(a_part_of_it_goes_home_too) {
  Home h;
  CHECK(h.pass(std::string(kMiB / 2, 'a') + std::string(kMiB / 2, 'b')));
  CHECK(h.send_home(h.block(0), kMiB / 2, kMiB / 2));
  CHECK(h.home_text(0) == std::string(kMiB / 2, 'b'));
  h.inbox.messages.clear();
  h.at_home.messages.clear();
  CHECK(h.pass(std::string(kMiB, 'c')));
}

CASE(what_cannot_go_home_is_copied) {
  Home h, other;
  CHECK(h.pass(std::string(kMiB, 'a')));
  CHECK(other.pass(std::string(kMiB, 'o')));
  CHECK(!h.send_home(h.block(0), 1, kMiB - 1));  // no tensor lies there
  CHECK(!h.send_home(other.block(0)));           // another link's
  CHECK(!other.send_home(h.block(0)));
  CHECK(!h.send_home(h.block(0), 0, kMiB + 64));  // more than came
  CHECK(h.send_home(h.block(0)));
  CHECK(!h.send_home(h.block(0)));  // it has gone
  CHECK(h.home_text(0) == std::string(kMiB - 1, 'a'));
  CHECK(h.home_text(1) == std::string(kMiB, 'o'));
  CHECK(h.home_text(4) == std::string(kMiB, 'a'));
}

CASE(what_came_home_over_another_link_is_copied) {
  Home h, other;
  for (Home* each : {&h, &other}) {
    CHECK(each->pass(std::string(kMiB, each == &h ? 'h' : 'o')));
    CHECK(each->send_home(each->block(0)));
    each->inbox.messages.clear();
  }
  for (auto [from, of] : {std::pair(&h, &other), std::pair(&other, &h)}) {
    CHECK_EQ(h.home(0).lease(), other.home(0).lease());
    Outgoing m;
    m.header.type = FrameType::kReply;
    m.segments.push_back({of->home(0).data(), kMiB, of->home(0).lease()});
    CHECK(from->ends.a->send(m) == SendState::kSent);
    receive_until(*from->ends.b, from->inbox, 1);
    CHECK(from->text(0) == std::string(kMiB, from == &h ? 'o' : 'h'));
  }
}

/// The message that it went home with may be here for a while, when the same memory comes again.
CASE(what_comes_again_is_another) {
  Home h;
  CHECK(h.pass(std::string(kMiB, 'a')));
  CHECK(h.send_home(h.block(0)));
  h.at_home.messages.clear();
  CHECK(h.pass(std::string(kMiB, 'b')));
  CHECK_EQ(h.block(1).data(), h.block(0).data());
  h.inbox.messages.erase(h.inbox.messages.begin());  // gives nothing back
  CHECK(h.text(0) == std::string(kMiB, 'b'));
  CHECK(h.send_home(h.block(0)));
  CHECK(h.home_text(0) == std::string(kMiB, 'b'));
  h.inbox.messages.clear();
  for (int i = 0; i < 3; ++i) CHECK(h.pass(std::string(kMiB, 'c')));
}

CASE(what_was_lent_and_came_home_can_be_given_again) {
  Home h;
  Lent lent = *h.ends.a->lend(kMiB);
  const std::byte* data = lent.memory->data();
  auto give = [&](const Block& block, std::uint64_t lease) {
    Outgoing m;
    m.header.type = FrameType::kReply;
    m.segments.push_back({block.data(), kMiB, lease});
    CHECK(h.ends.a->send(m) == SendState::kSent);
    receive_until(*h.ends.b, h.inbox, 1);
    return m.segments[0].lease != 0;
  };
  std::memset(lent.memory->data(), 'l', kMiB);
  CHECK(give(*lent.memory, lent.lease));
  CHECK(h.send_home(h.block(0)));  // while the first message is still here
  lent.memory.reset();
  CHECK_EQ(h.home(0).data(), data);
  h.inbox.messages.clear();
  CHECK(h.pass(std::string(kMiB, 'o')));  // lies elsewhere
  CHECK(h.home_text(0) == std::string(kMiB, 'l'));
  h.inbox.messages.clear();
  std::memset(h.home(0).data(), 'm', kMiB);
  CHECK(give(h.home(0), h.home(0).lease()));
  h.at_home.messages.clear();
  CHECK(h.text(0) == std::string(kMiB, 'm'));
  h.inbox.messages.clear();
  CHECK_EQ(h.ends.a->lend(kMiB)->memory->data(), data);
}

CASE(forks_have_each_what_came_home) {
  Home h;
  CHECK(h.pass(std::string(kMiB, 'a')));
  CHECK(h.send_home(h.block(0)));
  h.inbox.messages.clear();
  std::byte* data = h.home(0).data();
  CHECK(in_a_fork(
      [&] {
        const bool same = h.home_text(0) == std::string(kMiB, 'a');
        std::memset(data, 'c', kMiB);  // the child's own
        h.at_home.messages.clear();    // and not the child's to free
        return same;
      },
      [&] { std::memset(data, 'b', kMiB); }));
  CHECK(in_a_fork([&] { return h.home_text(0) == std::string(kMiB, 'b'); }, [] {}));
  CHECK(h.home_text(0) == std::string(kMiB, 'b'));
  h.at_home.messages.clear();
  for (int i = 0; i < 3; ++i) CHECK(h.pass(std::string(kMiB, static_cast<char>('0' + i))));
}

CASE(what_a_fork_has_made_private_is_copied) {
  Home h;
  CHECK(h.pass(std::string(kMiB, 'a')));
  CHECK(in_a_fork([&] { return h.text(0) == std::string(kMiB, 'a'); },
                  [&] { std::memset(h.block(0).data(), 'b', kMiB); }));
  CHECK(!h.send_home(h.block(0)));
  CHECK(h.home_text(0) == std::string(kMiB, 'b'));
}

CASE(what_came_home_outlives_its_link) {
  const int descriptors = open_descriptors();
  BlockPtr kept, theirs;
  Lent given;
  {
    Home h;
    h.warm_up(20 * kMiB);  // a chunk of its own
    given = *h.ends.a->lend(20 * kMiB);
    Outgoing m;
    m.header.type = FrameType::kRequest;
    m.segments.push_back({given.memory->data(), 20 * kMiB, given.lease});
    CHECK(h.ends.a->send(m) == SendState::kSent);
    receive_until(*h.ends.b, h.inbox, 1);
    theirs = std::move(h.inbox.messages[0].segments[0]);
    h.inbox.messages.clear();
    CHECK(h.pass(std::string(kMiB, 'a')));
    CHECK(h.pass(std::string(kMiB, 'b')));
    CHECK(h.send_home(h.block(0)));
    kept = std::move(h.at_home.messages[0].segments[0]);
    h.at_home.messages.clear();
  }
  theirs.reset();
  CHECK(mapped() >= 28 * kMiB);
  given.memory.reset();
  CHECK(mapped() <= 9 * kMiB);  // the chunk that it lies in
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
