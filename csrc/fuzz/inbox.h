// Inbox of the fuzzers: it has little memory, so that a false size allocates nothing large.
#pragma once

#include <new>
#include <vector>

#include "core/transport.h"
#include "memory/buffer_pool.h"

namespace telegrad::fuzz {

class SmallInbox final : public Inbox {
 public:
  /// `refuse_from`: the size of the smallest block for which there is no memory.
  explicit SmallInbox(std::size_t refuse_from) : refuse_from_(refuse_from) {}

  BlockPtr allocate(std::size_t size) override {
    if (size >= refuse_from_) throw std::bad_alloc();
    return pool_->allocate(size);
  }
  void deliver(Incoming&& message) override { messages.push_back(std::move(message)); }

  std::vector<Incoming> messages;

 private:
  const std::size_t refuse_from_;
  std::shared_ptr<BufferPool> pool_ = BufferPool::make(0);
};

}  // namespace telegrad::fuzz
