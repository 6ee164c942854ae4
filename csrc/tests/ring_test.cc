// The ring without a link; both ends are in one process, so the thread sanitizer sees both.
#include "transports/shm/ring.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "core/parker.h"
#include "tests/check.h"

namespace telegrad::test {
namespace {

constexpr std::size_t kCapacity = 1000;  // not a power of two: every part wraps around at some time

struct Ends {
  RingControl control{};
  std::vector<std::byte> data = std::vector<std::byte>(kCapacity);
  RingWriter writer{&control, data.data(), kCapacity};
  RingReader reader{&control, data.data(), kCapacity};
};

std::byte expected(std::uint64_t at) { return static_cast<std::byte>(at * 7 + at / 256); }

CASE(bytes_are_read_in_the_order_written) {
  auto e = std::make_unique<Ends>();
  const std::uint64_t total = static_cast<std::uint64_t>(times(1'000'000));
  Parker parker;
  std::thread writing([&] {
    Random random(1);
    std::vector<std::byte> piece;
    for (std::uint64_t at = 0; at < total;) {
      const std::size_t size = std::min<std::uint64_t>({random.below(300) + 1, e->writer.room(), total - at});
      if (size == 0) std::this_thread::yield();
      piece.resize(size);
      for (std::byte& b : piece) b = expected(at++);
      e->writer.put(piece.data(), size);
      if (e->writer.publish()) parker.notify();
    }
  });
  Random random(2);
  for (std::uint64_t at = 0; at < total;) {
    const auto bytes = e->reader.peek();
    CHECK(!e->reader.broken());
    if (bytes.empty()) {  // sleeps until it is woken: a lost wake-up would hang here
      parker.reset();
      e->reader.sleep();
      if (e->reader.ready()) {
        e->reader.wake();
      } else {
        while (!parker.is_notified()) parker.wait(kNever);
      }
      continue;
    }
    const std::size_t size = std::min<std::size_t>(bytes.size(), random.below(300) + 1);
    for (std::size_t i = 0; i < size; ++i) CHECK(bytes[i] == expected(at + i));
    e->reader.take(size);
    at += size;
  }
  writing.join();
  CHECK(e->reader.peek().empty());
}

CASE(a_full_ring_has_no_room) {
  auto e = std::make_unique<Ends>();
  const std::vector<std::byte> bytes(kCapacity);
  CHECK_EQ(e->writer.room(), kCapacity);
  e->writer.put(bytes.data(), kCapacity);
  CHECK(e->reader.peek().empty());  // not before it is published
  CHECK(!e->writer.publish());
  CHECK_EQ(e->writer.room(), 0u);
  CHECK(!e->writer.broken());
  CHECK_EQ(e->reader.peek().size(), kCapacity);
  e->reader.take(10);
  CHECK_EQ(e->writer.room(), 10u);
}

CASE(a_wake_up_is_requested_once) {
  auto e = std::make_unique<Ends>();
  e->reader.sleep();
  e->writer.put("a", 1);
  CHECK(e->writer.publish());
  e->writer.put("b", 1);
  CHECK(!e->writer.publish());
  CHECK(!e->reader.sleeps());
}

CASE(invalid_counts_break_the_ring) {
  for (const std::uint64_t lie : {std::uint64_t{kCapacity + 1}, ~std::uint64_t{0}, std::uint64_t{1} << 63}) {
    auto e = std::make_unique<Ends>();
    e->control.written = lie;
    CHECK(e->reader.ready());
    CHECK(e->reader.peek().empty());
    CHECK(e->reader.broken());
    e->control.written = 1;
    CHECK(e->reader.peek().empty());  // the ring stays broken
  }
  for (const std::uint64_t lie : {std::uint64_t{6}, ~std::uint64_t{0}, std::uint64_t{1} << 63}) {
    auto e = std::make_unique<Ends>();
    e->writer.put("hello", 5);
    e->writer.publish();
    e->control.read = lie;
    CHECK_EQ(e->writer.room(), 0u);
    CHECK(e->writer.broken());
    e->control.read = 5;
    CHECK_EQ(e->writer.room(), 0u);  // the ring stays broken
  }
}

}  // namespace
}  // namespace telegrad::test
