// Multicast over shared-memory links: the memory exists once, and every receiver owns its view.
#include "memory/multicast_arena.h"

#include <sys/resource.h>

#include <cstring>
#include <string_view>

#include "tests/links.h"

namespace telegrad::test {
namespace {

constexpr std::uint64_t kPlenty = std::uint64_t{1} << 30;

using Buffer = std::shared_ptr<MulticastBuffer>;

/// A receiver and the link to it.
struct Receiver {
  explicit Receiver(std::uint64_t limit = kPlenty) : ends("shm") {
    ends.a->set_limits({.leased = kPlenty});
    ends.b->set_limits({.leased = limit});
  }
  /// Announces the chunk of a buffer; returns whether the receiver knows it.
  bool announce(const Buffer& buffer) {
    RecordingInbox nothing;
    ends.a->announce(*buffer);
    receive(*ends.b, nothing, kAnyBudget);
    receive(*ends.a, nothing, kAnyBudget);
    return ends.a->announce(*buffer);
  }
  /// Sends a buffer; returns whether it was passed on without a copy.
  bool send(const Buffer& buffer) {
    Outgoing m;
    m.header.type = FrameType::kRequest;
    m.segments.push_back({.data = buffer->data(), .size = buffer->size(), .multicast = buffer.get()});
    const int before = inbox.allocations;
    const std::size_t count = inbox.messages.size();
    while (ends.a->send(m) == SendState::kBlocked) receive(*ends.b, inbox, kAnyBudget);
    receive_until(*ends.b, inbox, count + 1);
    RecordingInbox nothing;
    receive(*ends.a, nothing, kAnyBudget);
    return inbox.allocations == before;
  }
  std::byte* data(std::size_t i = 0) { return inbox.messages[i].segments[0]->data(); }
  bool has(char fill, std::size_t i = 0) {
    const std::string_view text(reinterpret_cast<char*>(data(i)), inbox.messages[i].segments[0]->size());
    return text.find_first_not_of(fill) == std::string_view::npos;
  }
  void drop() { inbox.messages.clear(); }

  Ends ends;
  RecordingInbox inbox;
};

struct SendingEnd {
  explicit SendingEnd(std::uint64_t limit = kPlenty) : multicast_arena(std::make_shared<MulticastArena>(limit)) {}
  Buffer allocate(char fill, std::size_t size = kMiB) {
    Buffer buffer = multicast_arena->allocate(size);
    CHECK(buffer && buffer->size() == size);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % kAlignment, 0u);
    std::memset(buffer->data(), fill, size);
    return buffer;
  }
  std::shared_ptr<MulticastArena> multicast_arena;
};

CASE(multicast_data_is_in_memory_once) {
  SendingEnd s;
  Receiver r[3];
  Buffer buffer = s.allocate('a');
  for (Receiver& one : r) CHECK(one.announce(buffer));
  for (char fill = 'a'; fill <= 'e'; ++fill) {
    buffer = nullptr;
    buffer = s.allocate(fill);
    for (Receiver& one : r) CHECK(one.send(buffer));
    for (Receiver& one : r) CHECK(one.has(fill));
    CHECK_EQ(s.multicast_arena->stats().buffers, 1u);
    buffer = nullptr;
    CHECK_EQ(s.multicast_arena->stats().buffers, 1u);
    for (Receiver& one : r) one.drop();
    CHECK_EQ(s.multicast_arena->stats().buffers, 0u);
  }
  CHECK_EQ(s.multicast_arena->stats().bytes, 8 * kMiB);  // used again
}

CASE(every_receiver_owns_its_view) {
  SendingEnd s;
  Receiver r[2];
  Buffer buffer = s.allocate('a');
  for (Receiver& one : r) CHECK(one.announce(buffer) && one.send(buffer));
  std::memset(r[0].data(), 'x', 3 * kPage);
  CHECK(r[1].has('a'));
  CHECK_EQ(static_cast<char>(buffer->data()[0]), 'a');
  CHECK_EQ(static_cast<char>(r[0].data()[0]), 'x');
  const std::byte* was_at = r[0].data();
  for (Receiver& one : r) one.drop();
  buffer = nullptr;
  buffer = s.allocate('b');
  for (Receiver& one : r) CHECK(one.send(buffer) && one.has('b'));  // no earlier write shows
  CHECK_EQ(r[0].data(), was_at);
}

CASE(one_receiver_gets_a_buffer_twice) {
  SendingEnd s;
  Receiver r;
  const Buffer buffer = s.allocate('a');
  CHECK(r.announce(buffer));
  CHECK(r.send(buffer));
  CHECK(!r.send(buffer) || r.data(0) != r.data(1));
  std::memset(r.data(0), 'x', kMiB);
  CHECK(r.has('a', 1));
}

CASE(a_receiver_without_the_chunk_gets_bytes) {
  SendingEnd s;
  Receiver prepared, refuses(0), not_asked;
  const Buffer buffer = s.allocate('a');
  CHECK(prepared.announce(buffer));
  CHECK(!refuses.announce(buffer));
  CHECK(prepared.send(buffer));
  CHECK(!refuses.send(buffer));
  CHECK(!not_asked.send(buffer));
  for (Receiver* one : {&prepared, &refuses, &not_asked}) CHECK(one->has('a'));
  CHECK(not_asked.send(buffer));  // the chunk has been announced meanwhile
}

CASE(other_transports_send_the_bytes) {
  SendingEnd s;
  const Buffer buffer = s.allocate('a');
  for (const char* scheme : {"unix", "tcp", "inproc"}) {
    Ends ends(scheme);
    RecordingInbox inbox;
    CHECK(!ends.a->announce(*buffer));
    Outgoing m;
    m.header.type = FrameType::kRequest;
    m.segments.push_back({.data = buffer->data(), .size = buffer->size(), .multicast = buffer.get()});
    while (ends.a->send(m) == SendState::kBlocked) receive(*ends.b, inbox, kAnyBudget);
    receive_until(*ends.b, inbox, 1);
    CHECK(std::memcmp(inbox.messages[0].segments[0]->data(), buffer->data(), kMiB) == 0);
  }
}

CASE(memory_that_a_lost_receiver_may_read_is_not_written_to) {
  SendingEnd s;
  Receiver stays;
  std::optional<Receiver> goes(std::in_place);
  Buffer buffer = s.allocate('a');
  for (Receiver* one : {&stays, &*goes}) CHECK(one->announce(buffer) && one->send(buffer));
  goes->ends.a.reset();  // the sender sees the end of the link; the other process may still read the buffer
  stays.drop();
  buffer = nullptr;
  for (char fill = 'b'; fill < 'g'; ++fill) {
    const Buffer next = s.allocate(fill);
    CHECK(stays.announce(next) && stays.send(next) && stays.has(fill));
    stays.drop();
    CHECK(goes->has('a'));
  }
  goes->ends.b.reset();
  CHECK(goes->has('a'));
  CHECK_EQ(s.multicast_arena->stats().buffers, 0u);
  CHECK_EQ(s.multicast_arena->stats().bytes, 8 * kMiB);  // of the chunk that replaced it
}

CASE(the_end_of_a_receiver_without_leases_keeps_the_chunk) {
  SendingEnd s;
  std::optional<Receiver> goes(std::in_place);
  Buffer buffer = s.allocate('a');
  const std::byte* data = buffer->data();
  CHECK(goes->announce(buffer) && goes->send(buffer));
  goes.reset();
  buffer = nullptr;
  CHECK_EQ(s.allocate('b')->data(), data);
}

CASE(chunks_stay_within_the_limit) {
  SendingEnd s(4 * kMiB);
  CHECK(!s.multicast_arena->allocate(5 * kMiB));
  std::vector<Buffer> all;
  while (Buffer buffer = s.multicast_arena->allocate(kMiB)) all.push_back(std::move(buffer));
  CHECK_EQ(all.size(), 4u);
  all.clear();
  CHECK(s.multicast_arena->allocate(4 * kMiB));
  CHECK(!SendingEnd(0).multicast_arena->allocate(1));
}

CASE(unused_chunks_are_released_and_receivers_are_notified) {
  SendingEnd s;
  Receiver r;
  const int descriptors = open_descriptors();
  Buffer buffer = s.allocate('a');
  CHECK(r.announce(buffer) && r.send(buffer));
  CHECK_EQ(open_descriptors(), descriptors + 2);  // of the chunk, at both ends
  s.multicast_arena->trim(kNever);
  CHECK_EQ(s.multicast_arena->stats().bytes, 8 * kMiB);  // in use
  r.drop();
  buffer = nullptr;
  s.multicast_arena->trim(0);
  CHECK_EQ(s.multicast_arena->stats().bytes, 8 * kMiB);  // used recently
  s.multicast_arena->trim(kNever);
  CHECK_EQ(s.multicast_arena->stats().bytes, 0u);
  r.ends.a->trim(kNever);
  receive(*r.ends.b, r.inbox, kAnyBudget);
  CHECK_EQ(open_descriptors(), descriptors + 1);  // the pagemap of this process
  buffer = s.allocate('b');
  CHECK(r.announce(buffer) && r.send(buffer) && r.has('b'));
}

long page_faults() {
  rusage usage;
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

CASE(pages_that_are_only_read_stay_mapped) {
  SendingEnd s;
  Receiver r;
  Buffer buffer = s.allocate('a', 8 * kMiB);
  CHECK(r.announce(buffer) && r.send(buffer) && r.has('a'));
  r.drop();
  std::memset(buffer->data(), 'b', 8 * kMiB);
  CHECK(r.send(buffer));
  const long before = page_faults();
  CHECK(r.has('b'));
  CHECK(page_faults() - before < 16);  // mapping again would cause 128 faults of 64 KiB each
}

CASE(a_receiver_that_writes_gets_copies) {
  SendingEnd s;
  Receiver r;
  const Buffer buffer = s.allocate('a');
  CHECK(r.announce(buffer) && r.send(buffer));
  std::memset(r.data(), 'x', kMiB);
  r.drop();
  int copies = 0;
  for (; !r.send(buffer); ++copies) {
    CHECK(r.has('a') && copies < 100);
    r.drop();
  }
  CHECK(copies > 1);
  CHECK(r.has('a'));
}

CASE(a_fork_keeps_multicast_tensors) {
  SendingEnd s;
  Receiver r;
  Buffer buffer = s.allocate('a');
  CHECK(r.announce(buffer) && r.send(buffer));
  r.data()[5] = std::byte{'x'};
  CHECK(in_a_fork(
      [&] {
        bool good = static_cast<char>(r.data()[5]) == 'x';
        r.data()[5] = std::byte{'a'};
        good = good && r.has('a');
        std::memset(r.data(), 'c', kMiB);
        r.drop();
        return good;
      },
      [&] {
        CHECK_EQ(static_cast<char>(r.data()[5]), 'x');
        r.drop();
        buffer = nullptr;
        buffer = s.allocate('b');
      }));
  r.send(buffer);
  CHECK(r.has('b'));
}

}  // namespace
}  // namespace telegrad::test
