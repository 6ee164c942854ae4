#include "transports/shm/ring.h"

#include <algorithm>
#include <cstring>

namespace telegrad {

std::size_t RingWriter::room() {
  const std::uint64_t read = control_->read.load(std::memory_order_acquire);
  if (broken_ || read - read_ > published_ - read_) {
    broken_ = true;
    return 0;
  }
  read_ = read;
  return capacity_ - static_cast<std::size_t>(written_ - read_);
}

void RingWriter::put(const void* bytes, std::size_t size) {
  if (size == 0) return;
  const std::size_t at = static_cast<std::size_t>(written_ % capacity_);
  const std::size_t first = std::min(size, capacity_ - at);
  std::memcpy(data_ + at, bytes, first);
  if (first < size) std::memcpy(data_, static_cast<const std::byte*>(bytes) + first, size - first);
  written_ += size;
}

bool RingWriter::publish() {
  published_ = written_;
  control_->written.store(written_, std::memory_order_seq_cst);
  return control_->sleeps.load(std::memory_order_seq_cst) != 0 &&
         control_->sleeps.exchange(0, std::memory_order_seq_cst) != 0;
}

std::span<const std::byte> RingReader::peek() {
  const std::uint64_t written = control_->written.load(std::memory_order_seq_cst);
  if (broken_ || written - read_ > capacity_) {
    broken_ = true;
    return {};
  }
  const std::size_t at = static_cast<std::size_t>(read_ % capacity_);
  return {data_ + at, std::min(static_cast<std::size_t>(written - read_), capacity_ - at)};
}

void RingReader::take(std::size_t size) {
  read_ += size;
  control_->read.store(read_, std::memory_order_release);
}

bool RingReader::writer_waits() {
  if (control_->waits.load(std::memory_order_relaxed) == 0) return false;
  control_->waits.store(0, std::memory_order_relaxed);
  return true;
}

}  // namespace telegrad
