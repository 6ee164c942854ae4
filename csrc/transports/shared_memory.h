// Memory that two processes have in common: a file without a name (memfd), mapped by both.
//
// Whoever reads memory of another process must not be at its mercy. A file that is cut while it is mapped kills its
// reader with SIGBUS, and so does a page that the machine cannot provide when it is touched. So a file is used only if
// it is sealed against changing its size, and once all its pages are there.
#pragma once

#include <cstddef>

#include "transports/descriptor.h"

namespace telegrad {

inline constexpr std::size_t kPage = 4096;
inline std::size_t whole_pages(std::size_t size) { return (size + kPage - 1) / kPage * kPage; }

/// Makes every page of a private mapping this process's own, as if each were written to with what it holds.
void own_pages(std::byte* data, std::size_t size);

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  /// A new file of `size` bytes (whole pages), all zero, sealed. Its pages come with `reserve`. Throws
  /// std::system_error.
  /// Whoever adopts one `to_be_read` cannot write to it.
  static SharedMemory create(std::size_t size, bool to_be_read = false);

  /// A file that another process has made with `create` and reserved. Throws std::system_error when it is not one of
  /// that size, sealed and reserved, or when it cannot be mapped.
  /// As a private view, nobody else sees what is written to it (see `make_private`).
  static SharedMemory adopt(Descriptor file, std::size_t size, bool is_private = false);

  /// Sees to it that the pages of [begin, end) are there. Throws std::system_error when the machine has no such memory.
  void reserve(std::size_t begin, std::size_t end);

  /// From now on nobody else sees what this process writes to some whole pages, and it sees what others write there
  /// until it has written to them itself (see `own_pages`). The file must be open. False: it cannot be done.
  bool make_private(std::byte* data, std::size_t size);
  /// Such pages as they were before; what has been written to them since is lost. False: it cannot be done.
  bool make_shared(std::byte* data, std::size_t size);

  /// Forked processes do not get this memory.
  void keep_from_forks();

  /// The file may be closed once everyone has it who is to: the memory stays.
  void close_file() { file_ = Descriptor(); }
  int file() const { return file_.get(); }

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void map(int flags);

  Descriptor file_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace telegrad
