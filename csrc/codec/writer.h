// Writer of bytes: on the stack while they are few, then in a Python bytes object, so that a long body is copied once.
// Needs the GIL.
#pragma once

#include <Python.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <new>

namespace telegrad::codec {

static_assert(std::endian::native == std::endian::little, "the codec writes numbers in the byte order of memory");

class Writer {
 public:
  Writer() = default;
  ~Writer() { Py_XDECREF(spilled_); }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const char* data() const { return data_; }

  void byte(std::uint8_t b) {
    if (size_ == capacity_) [[unlikely]]
      grow(1);
    data_[size_++] = static_cast<char>(b);
  }

  void varint(std::uint64_t v) {
    while (v >= 0x80) {
      byte(static_cast<std::uint8_t>(v | 0x80));
      v >>= 7;
    }
    byte(static_cast<std::uint8_t>(v));
  }

  void raw(const void* from, std::size_t n) {
    if (n > capacity_ - size_) [[unlikely]]
      grow(n);
    if (n) std::memcpy(data_ + size_, from, n);
    size_ += n;
  }

  template <class Number>
  void number(Number v) {
    raw(&v, sizeof v);
  }

  /// Writes a tag with a count: `fix` contains counts below `limit`; `tag` is followed by the count.
  void counted(std::uint8_t fix, std::uint64_t limit, std::uint8_t tag, std::uint64_t n) {
    if (n < limit) {
      byte(static_cast<std::uint8_t>(fix + n));
    } else {
      byte(tag);
      varint(n);
    }
  }

  /// Returns the bytes (a new reference); nullptr with MemoryError set. The writer is empty afterwards.
  PyObject* take() {
    const auto n = static_cast<Py_ssize_t>(size_);
    if (!spilled_) {
      size_ = 0;
      return PyBytes_FromStringAndSize(data_, n);
    }
    if (_PyBytes_Resize(&spilled_, n) < 0) spilled_ = nullptr;
    PyObject* bytes = spilled_;
    spilled_ = nullptr;
    data_ = inline_;
    size_ = 0;
    capacity_ = sizeof inline_;
    return bytes;
  }

 private:
  // Throws std::bad_alloc, because a check per byte would be too slow for this one error.
  void grow(std::size_t n) {
    if (n > PY_SSIZE_T_MAX / 2 - capacity_) throw std::bad_alloc();
    const std::size_t wanted = (capacity_ + n) * 2;
    if (spilled_) {
      if (_PyBytes_Resize(&spilled_, static_cast<Py_ssize_t>(wanted)) < 0) {
        spilled_ = nullptr;
        fail();
      }
    } else {
      spilled_ = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(wanted));
      if (!spilled_) fail();
      std::memcpy(PyBytes_AS_STRING(spilled_), inline_, size_);
    }
    data_ = PyBytes_AS_STRING(spilled_);
    capacity_ = wanted;
  }

  [[noreturn]] void fail() {
    PyErr_Clear();
    data_ = inline_;
    size_ = 0;
    capacity_ = sizeof inline_;
    throw std::bad_alloc();
  }

  char inline_[512];
  char* data_ = inline_;
  std::size_t size_ = 0;
  std::size_t capacity_ = sizeof inline_;
  PyObject* spilled_ = nullptr;
};

}  // namespace telegrad::codec
