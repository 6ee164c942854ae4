#include "memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>

namespace telegrad {
namespace {

constexpr int kRequiredSeals = F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void raise(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

}  // namespace

void populate_private_pages(std::byte* data, std::size_t size) {
#ifdef MADV_POPULATE_WRITE
  if (::madvise(data, size, MADV_POPULATE_WRITE) == 0) return;
#endif
  for (std::size_t at = 0; at < size; at += kPage) {
    std::atomic_ref<char>(*reinterpret_cast<char*>(data + at)).fetch_or(0, std::memory_order_relaxed);
  }
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_) ::munmap(data_, size_);
}

void SharedMemory::map(int flags) {
  void* memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, flags, file_.get(), 0);
  if (memory == MAP_FAILED) raise(errno, "cannot map shared memory");
  data_ = static_cast<std::byte*>(memory);
}

SharedMemory SharedMemory::create(std::size_t size, bool read_only) {
  SharedMemory m;
  m.size_ = size;
  m.file_ = UniqueFd(::memfd_create("telegrad", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!m.file_) raise(errno, "cannot create shared memory");
  if (::ftruncate(m.file_.get(), static_cast<off_t>(size)) != 0) raise(errno, "cannot create shared memory");
  m.map(MAP_SHARED);
  const int seals = kRequiredSeals | F_SEAL_SEAL | (read_only ? F_SEAL_FUTURE_WRITE : 0);
  if (::fcntl(m.file_.get(), F_ADD_SEALS, seals) != 0) raise(errno, "cannot seal shared memory");
  return m;
}

SharedMemory SharedMemory::map_file(UniqueFd file, std::size_t size, bool is_private) {
  SharedMemory m;
  m.size_ = size;
  m.file_ = std::move(file);
  const int seals = ::fcntl(m.file_.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kRequiredSeals) != kRequiredSeals)
    raise(EPERM, "shared memory is not sealed against truncation");
  struct stat s;
  if (::fstat(m.file_.get(), &s) != 0) raise(errno, "cannot examine shared memory");
  constexpr blkcnt_t kBlock = 512;
  if (s.st_size != static_cast<off_t>(size) || s.st_blocks * kBlock < static_cast<off_t>(size)) {
    raise(EINVAL, "shared memory is smaller than announced");
  }
  m.map(is_private ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED);
  return m;
}

void SharedMemory::reserve(std::size_t begin, std::size_t end) {
#ifdef MADV_POPULATE_WRITE
  // Where the kernel supports it, this maps the pages as well.
  if (::madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE) == 0) return;
#endif
  int error;
  do {
    error = ::fallocate(file_.get(), 0, static_cast<off_t>(begin), static_cast<off_t>(end - begin)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error != 0) raise(error, "cannot reserve shared memory");
}

bool SharedMemory::make_private(std::byte* data, std::size_t size) {
  // Other threads may use the memory meanwhile. The kernel replaces the mapping in one step with the same content, but
  // the thread sanitizer treats mmap as a write to all of it.
  constexpr long kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  return ::syscall(SYS_mmap, data, size, PROT_READ | PROT_WRITE, kFlags, file(), data - data_) != -1;
}

bool SharedMemory::make_shared(std::byte* data, std::size_t size) {
  return ::mmap(data, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file(), data - data_) != MAP_FAILED;
}

void SharedMemory::exclude_from_forks() { ::madvise(data_, size_, MADV_DONTFORK); }

}  // namespace telegrad
