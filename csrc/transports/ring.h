// One direction of bytes through memory that two processes share. One end writes, the other reads, neither waits, and
// neither trusts what the other puts there: a count that cannot be breaks the ring, nothing else.
//
// The reader looks for bytes by itself while it is awake. Before it sleeps it says so, and looks once more; a writer
// that finds it asleep rings its bell, which is not the ring's business. Each of the two first writes its own word and
// then reads the other's, all in one total order (seq_cst), so that one of them sees the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace telegrad {

/// What both ends see. All zero at first, but for `sleeps`.
struct RingControl {
  alignas(64) std::atomic<std::uint64_t> written;  // bytes so far; the writer's
  alignas(64) std::atomic<std::uint64_t> read;     // bytes so far; the reader's
  alignas(64) std::atomic<std::uint32_t> sleeps;   // the reader wants its bell rung for the next byte
  std::atomic<std::uint32_t> waits;                // the writer found no room; a hint, the reader forgets it
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class RingWriter {
 public:
  RingWriter() = default;
  RingWriter(RingControl* control, std::byte* data, std::size_t capacity)
      : control_(control), data_(data), capacity_(capacity) {}

  /// Bytes that can be written now. 0 as well when the reader's count cannot be: then the ring is broken.
  std::size_t room();
  bool broken() const { return broken_; }
  /// Copies bytes behind those before; there must be room. Nobody sees them before `publish`.
  void put(const void* bytes, std::size_t size);
  /// True: the reader sleeps, and its bell is to be rung.
  bool publish();
  void wait() { control_->waits.store(1, std::memory_order_relaxed); }

 private:
  RingControl* control_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::uint64_t written_ = 0;
  std::uint64_t published_ = 0;
  std::uint64_t read_ = 0;  // the reader's count when last looked at
  bool broken_ = false;
};

class RingReader {
 public:
  RingReader() = default;
  RingReader(RingControl* control, const std::byte* data, std::size_t capacity)
      : control_(control), data_(data), capacity_(capacity) {}

  /// Is there anything, or is the ring broken?
  bool ready() const { return control_->written.load(std::memory_order_seq_cst) != read_; }
  /// The next bytes in one piece; their writer may still change them. None as well when the ring is broken.
  std::span<const std::byte> peek();
  bool broken() const { return broken_; }
  void take(std::size_t size);

  /// The writer is to ring for the next byte. Look once more before relying on it.
  void sleep() { control_->sleeps.store(1, std::memory_order_seq_cst); }
  void wake() { control_->sleeps.store(0, std::memory_order_relaxed); }
  /// False: a writer has rung, or is about to.
  bool sleeps() const { return control_->sleeps.load(std::memory_order_relaxed) != 0; }
  /// Has the writer found no room since this was last asked?
  bool writer_waits();

 private:
  RingControl* control_ = nullptr;
  const std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::uint64_t read_ = 0;
  bool broken_ = false;
};

}  // namespace telegrad
