// Memory shared by two processes: an anonymous file (memfd) that both have mapped.
//
// A process must be safe from errors of the process that created the memory. If the file is truncated while mapped, or
// the system has no memory for a page on first access, the kernel kills the reader with SIGBUS. So a file is used only
// if it is sealed against changes of its size, and once all its pages are allocated.
#pragma once

#include <cstddef>

#include "base/unique_fd.h"

namespace telegrad {

inline constexpr std::size_t kPage = 4096;
inline std::size_t whole_pages(std::size_t size) { return (size + kPage - 1) / kPage * kPage; }

/// Copies every page of a private mapping for this process, as if each were written to.
void populate_private_pages(std::byte* data, std::size_t size);

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  /// Creates a sealed file of `size` bytes (whole pages), all zero. `reserve` allocates its pages. A process that maps
  /// a file created with `read_only` cannot write to it. Throws std::system_error.
  static SharedMemory create(std::size_t size, bool read_only = false);

  /// Maps a file that another process has created and reserved. Throws std::system_error if it does not have that size,
  /// is not sealed or reserved, or cannot be mapped. As a private view, its writes are copy-on-write (see
  /// `make_private`).
  static SharedMemory map_file(UniqueFd file, std::size_t size, bool is_private = false);

  /// Allocates the pages of [begin, end). Throws std::system_error if the system has no memory.
  void reserve(std::size_t begin, std::size_t end);

  /// Makes whole pages copy-on-write: this process sees writes of others until it has written to the page itself (see
  /// `populate_private_pages`). The file must be open. Returns false if this is impossible.
  bool make_private(std::byte* data, std::size_t size);
  /// Makes such pages shared again; writes since then are lost. Returns false if this is impossible.
  bool make_shared(std::byte* data, std::size_t size);

  /// Excludes this memory from forked processes.
  void exclude_from_forks();

  /// Closes the file, once every other process has it; the memory stays mapped.
  void close_file() { file_ = UniqueFd(); }
  int file() const { return file_.get(); }

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void map(int flags);

  UniqueFd file_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace telegrad
