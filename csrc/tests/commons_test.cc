// Multicast over shared-memory links: the memory exists once, and every receiver owns its view.
#include "transports/commons.h"

#include <sys/resource.h>

#include <cstring>
#include <string_view>

#include "tests/links.h"

namespace telegrad::test {
namespace {

constexpr std::uint64_t kPlenty = std::uint64_t{1} << 30;

using Piece = std::shared_ptr<Common>;

/// A receiver and the link to it.
struct Receiver {
  explicit Receiver(std::uint64_t limit = kPlenty) : ends("shm") {
    ends.a->set_limits({.lent = kPlenty});
    ends.b->set_limits({.lent = limit});
  }
  /// Announces the chunk of a buffer; returns whether the receiver knows it.
  bool prepare(const Piece& piece) {
    Collector nothing;
    ends.a->prepare(*piece);
    receive(*ends.b, nothing, kAnyBudget);
    receive(*ends.a, nothing, kAnyBudget);
    return ends.a->prepare(*piece);
  }
  /// Sends a buffer; returns whether it was passed on without a copy.
  bool send(const Piece& piece) {
    Outgoing m;
    m.header.type = FrameType::kRequest;
    m.segments.push_back({.data = piece->data(), .size = piece->size(), .common = piece.get()});
    const int before = inbox.allocations;
    const std::size_t count = inbox.messages.size();
    while (ends.a->send(m) == SendState::kBlocked) receive(*ends.b, inbox, kAnyBudget);
    receive_until(*ends.b, inbox, count + 1);
    Collector nothing;
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
  Collector inbox;
};

struct Sender {
  explicit Sender(std::uint64_t limit = kPlenty) : commons(std::make_shared<Commons>(limit)) {}
  Piece put(char fill, std::size_t size = kMiB) {
    Piece piece = commons->put(size);
    CHECK(piece && piece->size() == size);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(piece->data()) % kAlignment, 0u);
    std::memset(piece->data(), fill, size);
    return piece;
  }
  std::shared_ptr<Commons> commons;
};

CASE(multicast_data_is_in_memory_once) {
  Sender s;
  Receiver r[3];
  Piece piece = s.put('a');
  for (Receiver& one : r) CHECK(one.prepare(piece));
  for (char fill = 'a'; fill <= 'e'; ++fill) {
    piece = nullptr;
    piece = s.put(fill);
    for (Receiver& one : r) CHECK(one.send(piece));
    for (Receiver& one : r) CHECK(one.has(fill));
    CHECK_EQ(s.commons->stats().pieces, 1u);
    piece = nullptr;
    CHECK_EQ(s.commons->stats().pieces, 1u);
    for (Receiver& one : r) one.drop();
    CHECK_EQ(s.commons->stats().pieces, 0u);
  }
  CHECK_EQ(s.commons->stats().bytes, 8 * kMiB);  // used again
}

CASE(every_receiver_owns_its_view) {
  Sender s;
  Receiver r[2];
  Piece piece = s.put('a');
  for (Receiver& one : r) CHECK(one.prepare(piece) && one.send(piece));
  std::memset(r[0].data(), 'x', 3 * kPage);
  CHECK(r[1].has('a'));
  CHECK_EQ(static_cast<char>(piece->data()[0]), 'a');
  CHECK_EQ(static_cast<char>(r[0].data()[0]), 'x');
  const std::byte* was_at = r[0].data();
  for (Receiver& one : r) one.drop();
  piece = nullptr;
  piece = s.put('b');
  for (Receiver& one : r) CHECK(one.send(piece) && one.has('b'));  // no earlier write shows
  CHECK_EQ(r[0].data(), was_at);
}

CASE(one_receiver_gets_a_buffer_twice) {
  Sender s;
  Receiver r;
  const Piece piece = s.put('a');
  CHECK(r.prepare(piece));
  CHECK(r.send(piece));
  CHECK(!r.send(piece) || r.data(0) != r.data(1));
  std::memset(r.data(0), 'x', kMiB);
  CHECK(r.has('a', 1));
}

CASE(a_receiver_without_the_chunk_gets_bytes) {
  Sender s;
  Receiver prepared, refuses(0), not_asked;
  const Piece piece = s.put('a');
  CHECK(prepared.prepare(piece));
  CHECK(!refuses.prepare(piece));
  CHECK(prepared.send(piece));
  CHECK(!refuses.send(piece));
  CHECK(!not_asked.send(piece));
  for (Receiver* one : {&prepared, &refuses, &not_asked}) CHECK(one->has('a'));
  CHECK(not_asked.send(piece));  // the chunk has been announced meanwhile
}

CASE(other_transports_send_the_bytes) {
  Sender s;
  const Piece piece = s.put('a');
  for (const char* scheme : {"unix", "tcp", "inproc"}) {
    Ends ends(scheme);
    Collector inbox;
    CHECK(!ends.a->prepare(*piece));
    Outgoing m;
    m.header.type = FrameType::kRequest;
    m.segments.push_back({.data = piece->data(), .size = piece->size(), .common = piece.get()});
    while (ends.a->send(m) == SendState::kBlocked) receive(*ends.b, inbox, kAnyBudget);
    receive_until(*ends.b, inbox, 1);
    CHECK(std::memcmp(inbox.messages[0].segments[0]->data(), piece->data(), kMiB) == 0);
  }
}

CASE(memory_that_a_lost_receiver_may_read_is_not_written_to) {
  Sender s;
  Receiver stays;
  std::optional<Receiver> goes(std::in_place);
  Piece piece = s.put('a');
  for (Receiver* one : {&stays, &*goes}) CHECK(one->prepare(piece) && one->send(piece));
  goes->ends.a.reset();  // the sender sees the end of the link; the other process may still read the buffer
  stays.drop();
  piece = nullptr;
  for (char fill = 'b'; fill < 'g'; ++fill) {
    const Piece next = s.put(fill);
    CHECK(stays.prepare(next) && stays.send(next) && stays.has(fill));
    stays.drop();
    CHECK(goes->has('a'));
  }
  goes->ends.b.reset();
  CHECK(goes->has('a'));
  CHECK_EQ(s.commons->stats().pieces, 0u);
  CHECK_EQ(s.commons->stats().bytes, 8 * kMiB);  // of the chunk that replaced it
}

CASE(the_end_of_a_receiver_without_leases_keeps_the_chunk) {
  Sender s;
  std::optional<Receiver> goes(std::in_place);
  Piece piece = s.put('a');
  const std::byte* data = piece->data();
  CHECK(goes->prepare(piece) && goes->send(piece));
  goes.reset();
  piece = nullptr;
  CHECK_EQ(s.put('b')->data(), data);
}

CASE(chunks_stay_within_the_limit) {
  Sender s(4 * kMiB);
  CHECK(!s.commons->put(5 * kMiB));
  std::vector<Piece> all;
  while (Piece piece = s.commons->put(kMiB)) all.push_back(std::move(piece));
  CHECK_EQ(all.size(), 4u);
  all.clear();
  CHECK(s.commons->put(4 * kMiB));
  CHECK(!Sender(0).commons->put(1));
}

CASE(unused_chunks_are_released_and_receivers_are_notified) {
  Sender s;
  Receiver r;
  const int descriptors = open_descriptors();
  Piece piece = s.put('a');
  CHECK(r.prepare(piece) && r.send(piece));
  CHECK_EQ(open_descriptors(), descriptors + 2);  // of the chunk, at both ends
  s.commons->trim(kNever);
  CHECK_EQ(s.commons->stats().bytes, 8 * kMiB);  // in use
  r.drop();
  piece = nullptr;
  s.commons->trim(0);
  CHECK_EQ(s.commons->stats().bytes, 8 * kMiB);  // used recently
  s.commons->trim(kNever);
  CHECK_EQ(s.commons->stats().bytes, 0u);
  r.ends.a->trim(kNever);
  receive(*r.ends.b, r.inbox, kAnyBudget);
  CHECK_EQ(open_descriptors(), descriptors + 1);  // the pagemap of this process
  piece = s.put('b');
  CHECK(r.prepare(piece) && r.send(piece) && r.has('b'));
}

long page_faults() {
  rusage usage;
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

CASE(pages_that_are_only_read_stay_mapped) {
  Sender s;
  Receiver r;
  Piece piece = s.put('a', 8 * kMiB);
  CHECK(r.prepare(piece) && r.send(piece) && r.has('a'));
  r.drop();
  std::memset(piece->data(), 'b', 8 * kMiB);
  CHECK(r.send(piece));
  const long before = page_faults();
  CHECK(r.has('b'));
  CHECK(page_faults() - before < 16);  // mapping again would cause 128 faults of 64 KiB each
}

CASE(a_receiver_that_writes_gets_copies) {
  Sender s;
  Receiver r;
  const Piece piece = s.put('a');
  CHECK(r.prepare(piece) && r.send(piece));
  std::memset(r.data(), 'x', kMiB);
  r.drop();
  int copies = 0;
  for (; !r.send(piece); ++copies) {
    CHECK(r.has('a') && copies < 100);
    r.drop();
  }
  CHECK(copies > 1);
  CHECK(r.has('a'));
}

CASE(a_fork_keeps_multicast_tensors) {
  Sender s;
  Receiver r;
  Piece piece = s.put('a');
  CHECK(r.prepare(piece) && r.send(piece));
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
        piece = nullptr;
        piece = s.put('b');
      }));
  r.send(piece);
  CHECK(r.has('b'));
}

}  // namespace
}  // namespace telegrad::test
