// Shared-memory links: tensors that are used in place, full arenas, and forks.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <vector>

#include "tests/links.h"
#include "tests/shm_pair.h"
#include "transports/shm/seqpacket.h"
#include "transports/shm/shm_link.h"

namespace telegrad::test {
namespace {

// ---- the arena

CASE(large_segments_are_copied_once) {
  Pair p;
  CHECK(!p.pass(std::string(kMiB, 'a')));  // there is no memory yet
  p.warm_up(kMiB);
  for (const std::size_t size : {std::size_t{32} << 10, kMiB, 3 * kMiB + 7}) CHECK(p.pass(std::string(size, 'b')));
  CHECK(p.pass(std::string(8 << 10, 'c')));
  CHECK(!p.pass(std::string((8 << 10) - 1, 'd')));  // too small for the arena
}

/// A copy in parts lets others send between them, and needs nothing of the receiver.
CASE(a_copy_in_parts_may_continue_at_once) {
  Pair p;
  p.warm_up(3 * kMiB);
  Link &a = *p.ends.a, &b = *p.ends.b;
  const std::string bytes(3 * kMiB, 'a');
  Outgoing m;
  m.header.type = FrameType::kRequest;
  m.segments.push_back({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
  for (int part = 1; part < 3; ++part) {
    CHECK(a.send(m) == SendState::kBlocked);
    CHECK(a.may_continue());
  }
  CHECK(a.send(m) == SendState::kSent);
  receive_until(b, p.inbox, 1);
  CHECK(p.text(0) == bytes);
  Clogged clogged = clog(a, 100);
  CHECK(!a.may_continue());  // it waits for the receiver
}

CASE(a_receiver_owns_its_tensors) {
  Pair p;
  p.warm_up(kMiB);
  CHECK(p.pass(std::string(kMiB, 'a')));
  std::memset(p.block(0).data(), 'x', kMiB);
  for (int i = 0; i < 5; ++i) CHECK(p.pass(std::string(kMiB, static_cast<char>('b' + i))));
  CHECK(p.text(0) == std::string(kMiB, 'x'));
  p.inbox.messages.clear();
  CHECK(p.pass(std::string(kMiB, 'y')));  // in memory of earlier tensors
}

CASE(memory_is_reused) {
  Pair p;
  p.warm_up(4 * kMiB);
  const std::size_t before = p.ends.a->lease_capacity();
  for (int i = 0; i < 100; ++i) {
    CHECK(p.pass(std::string(4 * kMiB, static_cast<char>(i))));
    p.inbox.messages.clear();
  }
  CHECK_EQ(p.ends.a->lease_capacity(), before);
}

CASE(a_full_arena_sends_bytes) {
  Pair p(16 * kMiB);
  int leased = 0, sent = 0;
  for (int i = 0; i < 40; ++i) (p.pass(std::string(kMiB, static_cast<char>(i))) ? leased : sent)++;
  CHECK(leased >= 8 && leased <= 16);
  CHECK(p.ends.a->lease_capacity() <= 16 * kMiB);
  for (std::size_t i = 0; i < 40; ++i) CHECK(p.text(i) == std::string(kMiB, static_cast<char>(i)));
  p.inbox.messages.clear();
  CHECK(p.pass(std::string(kMiB, 'z')));
}

CASE(thousands_of_tensors_at_once) {
  Pair p;
  p.warm_up(64 << 10);
  Message m;
  m.header.type = FrameType::kRequest;
  for (int i = 0; i < 6000; ++i) m.segments.push_back(std::string(33 << 10, static_cast<char>(i)));
  for (int round = 0; round < 2; ++round) {
    send_whole(*p.ends.a, m, *p.ends.b, p.inbox);
    receive_until(*p.ends.b, p.inbox, 1);
    check_same(m, p.inbox.messages[0]);
    p.inbox.messages.clear();
  }
}

/// The number of leases at a time is limited by the list of returned ones. More tensors are sent as bytes.
CASE(thousands_of_tensors_that_are_held) {
  constexpr std::size_t kSmallest = 8 << 10;
  Pair p;
  p.warm_up(kSmallest);
  std::size_t leased = 0;
  for (std::size_t i = 0; i < ReleaseQueue::kSlots + 200; ++i)
    leased += p.pass(std::string(kSmallest, static_cast<char>(i)));
  CHECK_EQ(leased, ReleaseQueue::kSlots);
  CHECK(p.ends.a->lease_capacity() <= 2 * kSmallest * ReleaseQueue::kSlots);
  for (std::size_t i = 0; i < p.inbox.messages.size(); i += 97) {
    CHECK(p.text(i) == std::string(kSmallest, static_cast<char>(i)));
  }
  p.inbox.messages.clear();
  CHECK(p.pass(std::string(kSmallest, 'z')));
}

CASE(a_peer_that_maps_no_memory_gets_bytes) {
  Pair p;
  p.ends.b->set_limits({.leased = 0});
  for (int i = 0; i < 5; ++i) CHECK(!p.pass(std::string(kMiB, 'a')));
  CHECK_EQ(p.ends.a->lease_capacity(), 0u);
}

/// Sets the limit of descriptors for its lifetime.
struct NoDescriptors {
  NoDescriptors() {
    try {  // the undefined-behavior sanitizer checks a type once, with a pipe
      throw std::system_error(EMFILE, std::generic_category(), "rehearsal");
    } catch (const std::system_error& e) {
      CHECK_EQ(e.code().value(), EMFILE);
    }
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
    rlimit few = old;
    few.rlim_cur = 256;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    while (UniqueFd d{dup(0)}) held.push_back(std::move(d));
  }
  ~NoDescriptors() { CHECK_EQ(setrlimit(RLIMIT_NOFILE, &old), 0); }
  rlimit old;
  std::vector<UniqueFd> held;
};

CASE(without_descriptors_tensors_are_sent_as_bytes) {
  Pair fresh, warm;
  warm.warm_up(kMiB);
  {
    NoDescriptors none;
    for (int i = 0; i < 5; ++i) CHECK(!fresh.pass(std::string(kMiB, 'a')));
    CHECK_EQ(fresh.ends.a->lease_capacity(), 0u);
    CHECK(warm.pass(std::string(kMiB, 'a')));        // existing chunks need no descriptor
    CHECK(!warm.pass(std::string(16 * kMiB, 'b')));  // new ones do
  }
  const Nanos begin = now();
  while (!fresh.pass(std::string(kMiB, 'c')) || !warm.pass(std::string(16 * kMiB, 'd'))) {  // the arena tries again
    fresh.inbox.messages.clear();
    warm.inbox.messages.clear();
    CHECK(now() - begin < 20 * kSecond);
  }
}

CASE(unauthenticated_connections_get_no_leases) {
  Pair p;
  p.ends.a->set_limits(kHandshakeLimits);
  for (int i = 0; i < 5; ++i) CHECK(!p.pass(std::string(kMiB, 'a')));
  CHECK(!p.ends.a->lease(1));
}

CASE(unused_memory_is_released) {
  Pair p;
  p.warm_up(kMiB);
  const int descriptors = open_descriptors();
  CHECK(p.pass(std::string(kMiB, 'a')));
  p.ends.a->trim(kNever);
  CHECK(p.ends.a->lease_capacity() > 0);  // in use
  p.inbox.messages.clear();
  p.ends.a->trim(0);
  CHECK(p.ends.a->lease_capacity() > 0);  // used recently
  p.ends.a->trim(kNever);
  CHECK_EQ(p.ends.a->lease_capacity(), 0u);
  receive(*p.ends.b, p.inbox, kAnyBudget);
  CHECK_EQ(open_descriptors(), descriptors - 2);  // one at each end
  p.warm_up(kMiB);                                // the arena grows again when needed
}

/// Leased memory of `a`, filled.
LinkLease lent_by(Pair& p, char fill) {
  auto leased = p.ends.a->lease(kMiB);
  for (int i = 0; !leased; ++i) {
    CHECK(i < 100);
    p.pass(std::string(kMiB, 'w'));
    p.inbox.messages.clear();
    leased = p.ends.a->lease(kMiB);
  }
  std::memset(leased->memory->data(), fill, kMiB);
  return std::move(*leased);
}

/// Sends the memory; returns whether it was passed on without a copy.
bool give(Pair& p, const LinkLease& leased) {
  Outgoing m;
  m.header.type = FrameType::kRequest;
  m.segments.push_back({leased.memory->data(), kMiB, leased.lease});
  const int before = p.inbox.allocations;
  const std::size_t count = p.inbox.messages.size();
  CHECK(p.ends.a->send(m) == SendState::kSent);
  receive_until(*p.ends.b, p.inbox, count + 1);
  return p.inbox.allocations == before && m.segments[0].data == leased.memory->data();
}

CASE(leased_memory_belongs_to_the_receiver_once_it_is_passed_on) {
  Pair p;
  for (int round = 0; round < 3; ++round) {
    LinkLease leased = lent_by(p, static_cast<char>('a' + round));
    CHECK(give(p, leased));
    leased.memory.reset();
    CHECK(p.text(0) == std::string(kMiB, static_cast<char>('a' + round)));
    std::memset(p.block(0).data(), 'x', kMiB / 2);
    CHECK(p.pass(std::string(kMiB, 'o')));  // uses another region
    CHECK(p.text(0).substr(0, 10) == "xxxxxxxxxx");
    p.inbox.messages.clear();
  }
}

CASE(leased_memory_of_a_closed_link_is_copied) {
  Pair p, q;
  LinkLease leased = lent_by(p, 'a');
  q.warm_up(kMiB);
  CHECK(!give(q, leased));  // another link cannot pass it on either
  CHECK(q.text(0) == std::string(kMiB, 'a'));
  p.ends.b.reset();
  RecordingInbox nothing;
  receive_until_broken(*p.ends.a, nothing);
  p.ends.a.reset();
  CHECK(static_cast<char>(leased.memory->data()[kMiB - 1]) == 'a');
}

// ---- forks

CASE(a_fork_keeps_tensors_as_they_were) {
  Pair p;
  p.warm_up(kMiB);
  CHECK(p.pass(std::string(kMiB, 'a')));
  CHECK(p.pass(std::string(kMiB, 'b')));
  const std::byte* first = p.block(0).data();
  CHECK(in_a_fork(
      [&] {
        const bool same = p.text(0) == std::string(kMiB, 'a') && p.text(1) == std::string(kMiB, 'b');
        std::memset(p.block(1).data(), 'c', kMiB);  // the child's copy
        p.inbox.messages.pop_back();
        return same;
      },
      [&] {
        std::memset(p.block(0).data(), 'x', kMiB);
        p.inbox.messages.erase(p.inbox.messages.begin());
        CHECK(p.pass(std::string(kMiB, 'y')));
        CHECK_EQ(p.block(1).data(), first);  // in memory of the first tensor
      }));
  CHECK(p.text(0) == std::string(kMiB, 'b'));
  CHECK(p.text(1) == std::string(kMiB, 'y'));
  p.inbox.messages.clear();
  for (int i = 0; i < 4; ++i) CHECK(p.pass(std::string(kMiB, static_cast<char>('0' + i))));
}

CASE(a_fork_after_the_end_of_the_link_keeps_tensors) {
  std::vector<BlockPtr> kept;  // in one chunk
  {
    Pair p;
    p.warm_up(2 * kMiB);
    for (int i = 0; i < 2; ++i) {
      CHECK(p.pass(std::string(kMiB, 'a')));
      kept.push_back(std::move(p.inbox.messages.back().segments[0]));
    }
  }
  const auto last = [&](int i) { return static_cast<char>(kept[i]->data()[kMiB - 1]); };
  CHECK(in_a_fork([&] { return last(0) == 'a' && last(1) == 'a'; },
                  [&] {
                    for (const BlockPtr& one : kept) std::memset(one->data(), 'b', kMiB);
                  }));
}

CASE(parent_and_child_have_separate_copies_of_leased_memory) {
  Pair p;
  LinkLease leased = lent_by(p, 'a');
  std::byte* data = leased.memory->data();
  CHECK(in_a_fork(
      [&] {
        const bool same = std::string_view(reinterpret_cast<char*>(data), kMiB) == std::string(kMiB, 'a');
        std::memset(data, 'c', kMiB);  // the child's copy
        leased.memory.reset();         // which the child must not return
        return same;
      },
      [&] { std::memset(data, 'b', kMiB); }));
  CHECK(!p.ends.a->lease(std::size_t{1} << 30));
  CHECK(!give(p, leased));  // later writes are private to this process
  CHECK(p.text(0) == std::string(kMiB, 'b'));
  p.inbox.messages.clear();
  leased.memory.reset();
  LinkLease again = lent_by(p, 'd');
  CHECK_EQ(again.memory->data(), data);
  CHECK(give(p, again));
  CHECK(p.text(0) == std::string(kMiB, 'd'));
}

CASE(a_fork_does_not_copy_memory_that_was_passed_on) {
  Pair p;
  LinkLease leased = lent_by(p, 'a');
  CHECK(give(p, leased));
  CHECK(in_a_fork([&] { return p.text(0) == std::string(kMiB, 'a'); },
                  [&] {
                    leased.memory.reset();
                    p.inbox.messages.clear();
                    CHECK(p.pass(std::string(kMiB, 'n')));
                  }));
}

// ---- arena space for large segments

constexpr std::size_t kLarge = 16 * kMiB;

CASE(large_segments_wait_for_arena_space) {
  Pair p;
  for (const char fill : {'a', 'b', 'c'}) CHECK(p.pass(std::string(kLarge, fill)));  // none of them is released
  CHECK(p.ends.a->lease_capacity() <= 4 * kLarge);
}

CASE(large_segments_without_arena_space_are_sent_as_bytes) {
  Pair refused, limited(kLarge / 2);
  refused.ends.b->set_limits({.leased = 0});
  for (Pair* p : {&refused, &limited}) {
    CHECK(!p->pass(std::string(kLarge, 'a')));
    CHECK(!p->pass(std::string(kLarge, 'b')));
  }
}

CASE(large_segments_are_sent_as_bytes_if_no_chunk_can_be_offered) {
  Pair p;
  Link &a = *p.ends.a, &b = *p.ends.b;
  while (send_packet(a.fd(), "", 1) == 0) {
  }
  const std::string bytes(kLarge, 'a');
  Outgoing m;
  m.header.type = FrameType::kRequest;
  m.segments.push_back({reinterpret_cast<const std::byte*>(bytes.data()), kLarge});
  for (int turn = 0; !m.is_begun(); ++turn) {  // its first part fits into the ring
    CHECK(turn < 100);
    CHECK(a.send(m) == SendState::kBlocked);
  }
  CHECK(a.waits_for_fd());
  while (a.send(m) == SendState::kBlocked) receive(b, p.inbox, kAnyBudget);
  receive_until(b, p.inbox, 1);
  CHECK_EQ(p.inbox.allocations, 1);
  CHECK(p.text(0) == bytes);
  p.warm_up(kLarge);  // a chunk can be offered again
}

/// The answer to an offer is sent once there is room for it, even if no other packet arrives.
CASE(a_delayed_answer_is_sent_later) {
  Pair p;
  Link &a = *p.ends.a, &b = *p.ends.b;
  Clogged clogged = clog(b, kMiB / 256);
  const std::string bytes(kLarge, 'a');
  Outgoing m;
  m.header.type = FrameType::kRequest;
  m.segments.push_back({reinterpret_cast<const std::byte*>(bytes.data()), kLarge});
  while (a.send(m) == SendState::kBlocked && a.waits_for_fd()) CHECK(writable(a.fd()));
  CHECK(!a.waits_for_fd());
  CHECK(b.receive(p.inbox, kAnyBudget) == ReceiveState::kToSend);
  CHECK(b.flush() == SendState::kBlocked);
  RecordingInbox got;
  while (a.receive(got, kAnyBudget) != ReceiveState::kToSend) {  // from now on the socket of `b` has room
    while (b.flush() == SendState::kBlocked) CHECK(writable(b.fd()));
  }
  while (a.send(m) == SendState::kBlocked) CHECK(a.waits_for_fd());  // it is copied in parts
  receive_until(b, p.inbox, 1);
  CHECK_EQ(p.inbox.allocations, 0);
  CHECK(p.text(0) == bytes);
}

}  // namespace
}  // namespace telegrad::test
