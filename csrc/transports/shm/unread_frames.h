// Bytes in an arena that the peer has not seen yet, because it has not read the frames that name them.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>

namespace telegrad {

class UnreadFrames {
 public:
  /// Adds a frame that ends at `end` in the ring. `read`: how much of the ring the peer has read. Any thread.
  void add(std::uint64_t end, std::uint64_t bytes, std::uint64_t read) {
    if (bytes < kMinBytes) return;
    std::lock_guard lock(mutex_);
    remove_read(read);
    frames_.push_back({end, bytes});
    bytes_ += bytes;
  }

  /// Returns the bytes of the frames that the peer has not read. Any thread.
  std::uint64_t bytes(std::uint64_t read) {
    std::lock_guard lock(mutex_);
    remove_read(read);
    return bytes_;
  }

 private:
  static constexpr std::uint64_t kMinBytes = 64 << 10;  // the ring bounds the number of smaller ones

  struct Frame {
    std::uint64_t end, bytes;
  };

  void remove_read(std::uint64_t read) {
    while (!frames_.empty() && frames_.front().end <= read) {
      bytes_ -= frames_.front().bytes;
      frames_.pop_front();
    }
  }

  std::mutex mutex_;
  std::deque<Frame> frames_;
  std::uint64_t bytes_ = 0;
};

}  // namespace telegrad
