// Ownership of received memory until it belongs to a tensor.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>

namespace telegrad::codec {

/// Owner of one segment: `release(context)` runs once, on the thread that drops the last tensor, with or without the
/// GIL.
class SegmentMemory {
 public:
  using Release = void (*)(void* context) noexcept;

  SegmentMemory() = default;
  SegmentMemory(std::byte* data, std::size_t size, void* context, Release release)
      : data_(data), size_(size), context_(context), release_(release) {}
  SegmentMemory(SegmentMemory&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)),
        size_(std::exchange(o.size_, 0)),
        context_(std::exchange(o.context_, nullptr)),
        release_(std::exchange(o.release_, nullptr)) {}
  SegmentMemory& operator=(SegmentMemory&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
    std::swap(context_, o.context_);
    std::swap(release_, o.release_);
    return *this;
  }
  ~SegmentMemory() {
    if (release_) release_(context_);
  }

  /// Returns the memory of an object with a writable buffer and keeps the buffer exported. Needs the GIL. If the object
  /// has no such buffer, the result is not valid() and a Python error is set.
  static SegmentMemory of_object(PyObject* object);

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool valid() const { return release_ != nullptr; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  void* context_ = nullptr;
  Release release_ = nullptr;
};

/// Python object that exposes the memory as a writable buffer.
nanobind::object as_buffer(SegmentMemory memory);

/// Registers its class.
void init_memory(nanobind::module_& m);

}  // namespace telegrad::codec
