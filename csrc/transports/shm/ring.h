// Byte queue for one direction, in memory that two processes share. One end writes, the other reads; neither blocks,
// and neither trusts the data of the other. An invalid count breaks the ring and has no other effect.
//
// The reader polls the ring while it is awake. Before it sleeps, it sets `sleeps` and polls once more. A writer that
// finds `sleeps` set wakes the reader, which is the task of the link. Each end first writes its own word and then reads
// the other's, all in one total order (seq_cst), so one of them sees the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace telegrad {

/// Control words of both ends. All zero initially, except `sleeps`.
struct RingControl {
  alignas(64) std::atomic<std::uint64_t> written;  // bytes so far; written by the writer
  alignas(64) std::atomic<std::uint64_t> read;     // bytes so far; written by the reader
  alignas(64) std::atomic<std::uint32_t> sleeps;   // the reader must be woken for the next byte
  std::atomic<std::uint32_t> waits;                // the writer found no room; a hint, cleared by the reader
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class RingWriter {
 public:
  RingWriter() = default;
  RingWriter(RingControl* control, std::byte* data, std::size_t capacity)
      : control_(control), data_(data), capacity_(capacity) {}

  /// Returns how many bytes can be written now. Also 0 if the reader's count is invalid; then the ring is broken.
  std::size_t room();
  bool broken() const { return broken_; }
  /// Appends bytes, for which there must be room. They become visible with `publish`.
  void put(const void* bytes, std::size_t size);
  /// Makes the bytes visible. Returns true if the reader sleeps and must be woken.
  bool publish();
  /// Returns how many bytes have been written from the start.
  std::uint64_t written() const { return written_; }
  void wait() { control_->waits.store(1, std::memory_order_relaxed); }

 private:
  RingControl* control_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::uint64_t written_ = 0;
  std::uint64_t published_ = 0;
  std::uint64_t read_ = 0;  // the reader's count when last read
  bool broken_ = false;
};

class RingReader {
 public:
  RingReader() = default;
  RingReader(RingControl* control, const std::byte* data, std::size_t capacity)
      : control_(control), data_(data), capacity_(capacity) {}

  /// Returns whether there are bytes, or the ring is broken.
  bool ready() const { return control_->written.load(std::memory_order_seq_cst) != read_; }
  /// Returns the next contiguous bytes; the writer may still change them. Empty as well if the ring is broken.
  std::span<const std::byte> peek();
  bool broken() const { return broken_; }
  void take(std::size_t size);

  /// Asks the writer to wake this end for the next byte. The caller must poll once more before it sleeps.
  void sleep() { control_->sleeps.store(1, std::memory_order_seq_cst); }
  void wake() { control_->sleeps.store(0, std::memory_order_relaxed); }
  /// Returns false if the writer has woken this end or is about to.
  bool sleeps() const { return control_->sleeps.load(std::memory_order_relaxed) != 0; }
  /// Returns whether the writer has found no room since the last call.
  bool writer_waits();

 private:
  RingControl* control_ = nullptr;
  const std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::uint64_t read_ = 0;
  bool broken_ = false;
};

}  // namespace telegrad
