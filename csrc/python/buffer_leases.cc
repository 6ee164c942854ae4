#include "python/buffer_leases.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/fork_handlers.h"
#include "python/block.h"
#include "python/deferred_decref.h"

namespace telegrad::python {
namespace {

namespace nb = nanobind;

constexpr std::uint64_t kAnyConnection =
    0;  // no connection has this number: the link finds out whether memory is its own

class LeaseHolder;

/// Leased memory that tensors may use, by address. Memory that only a message holds is absent: the peer may return it,
/// split in other segments, before the message is destroyed.
struct Registry {
  struct Entry {
    const LeaseHolder* of;
    std::weak_ptr<LeaseHolder> holder;
  };
  std::mutex mutex;
  std::map<std::uintptr_t, Entry> leases;
  std::atomic<std::size_t> count = 0;
};

Registry& registry() {
  static auto* r = new Registry;  // never destroyed: tensors may outlive static objects
  return *r;
}

[[maybe_unused]] const bool holder = lock_at_fork(registry().mutex);

std::uintptr_t address_of(const std::byte* data) { return reinterpret_cast<std::uintptr_t>(data); }

/// Lease shared by the tensors in its memory and by messages. May be destroyed on any thread.
class LeaseHolder {
 public:
  static std::shared_ptr<LeaseHolder> make(BufferLease lease) {
    auto made = std::make_shared<LeaseHolder>(std::move(lease));
    Registry& r = registry();
    std::lock_guard lock(r.mutex);
    r.leases[address_of(made->lease.memory->data())] = {made.get(), made};
    return made;
  }
  /// Returns the holder of the memory that contains the bytes, or null.
  static std::shared_ptr<LeaseHolder> of(const std::byte* data, std::uint64_t size) {
    Registry& r = registry();
    std::shared_ptr<LeaseHolder> found;  // destroyed without the lock
    std::lock_guard lock(r.mutex);
    const auto next = r.leases.upper_bound(address_of(data));
    if (next == r.leases.begin()) return nullptr;
    found = std::prev(next)->second.holder.lock();
    if (!found) return nullptr;
    const Block& memory = *found->lease.memory;
    return data + size <= memory.data() + memory.size() ? found : nullptr;
  }

  explicit LeaseHolder(BufferLease lease) : lease(std::move(lease)) {
    registry().count.fetch_add(1, std::memory_order_relaxed);
  }
  ~LeaseHolder() {
    unregister();
    registry().count.fetch_sub(1, std::memory_order_relaxed);
  }
  LeaseHolder(const LeaseHolder&) = delete;
  LeaseHolder& operator=(const LeaseHolder&) = delete;

  /// Unregisters the memory: no tensor uses it any more.
  void unregister() const {
    Registry& r = registry();
    std::lock_guard lock(r.mutex);
    const auto found = r.leases.find(address_of(lease.memory->data()));
    if (found != r.leases.end() && found->second.of == this) r.leases.erase(found);
  }

  const BufferLease lease;
};

/// `_core.LeasedBuffer`: leased memory with the buffer interface.
struct PyLeasedBuffer {
  std::shared_ptr<LeaseHolder> holder;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Block& block = *nb::inst_ptr<PyLeasedBuffer>(self)->holder->lease.memory;
  return PyBuffer_FillInfo(view, self, block.data(), static_cast<Py_ssize_t>(block.size()), 0, flags);
}

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

}  // namespace

bool any_leases() { return registry().count.load(std::memory_order_relaxed) > 0; }

void hand_off_leases(Outgoing& m, std::uint64_t connection) {
  if (!any_leases() || !m.owner || m.immutable) return;
  auto& owner = static_cast<PyRefs&>(*m.owner);
  std::vector<std::pair<OutSegment*, std::shared_ptr<LeaseHolder>>> mine;
  for (std::size_t i = 0; i < m.segments.size(); ++i) {
    OutSegment& s = m.segments[i];
    auto one = LeaseHolder::of(s.data, s.size);
    if (!one || (one->lease.connection != kAnyConnection && one->lease.connection != connection)) continue;
    mine.emplace_back(&s, std::move(one));
    owner.drop(1 + i);  // the body is the first
  }
  for (auto& [segment, one] : mine) {
    const BufferLease& lease = one->lease;
    // Returning a small part would keep all of the received memory in use. Leased memory was requested for the reply.
    const bool too_little = lease.connection == kAnyConnection && segment->size < lease.memory->size() / 2;
    if (one.use_count() > 1 || too_little) continue;
    one->unregister();
    segment->lease = lease.lease;
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // all accesses precede the release of a reference
  for (auto& [segment, one] : mine) owner.hold(std::move(one));
}

nb::object lease(Engine& engine, std::int32_t peer, std::uint64_t connection, std::size_t size) {
  auto lease = engine.lease(peer, connection, size);
  return lease ? nb::cast(PyLeasedBuffer{LeaseHolder::make(std::move(*lease))}) : nb::none();
}

codec::SegmentMemory memory_of(BlockPtr block) {
  std::byte* const data = block->data();
  const std::size_t size = block->size();
  if (const std::uint64_t lease = block->lease()) {
    auto holder = LeaseHolder::make({.connection = kAnyConnection, .lease = lease, .memory = std::move(block)});
    return {data, size, new std::shared_ptr<LeaseHolder>(std::move(holder)),
            [](void* context) noexcept { delete static_cast<std::shared_ptr<LeaseHolder>*>(context); }};
  }
  return {data, size, block.release(), [](void* context) noexcept { delete static_cast<Block*>(context); }};
}

nb::object object_of(BlockPtr block) {
  const std::uint64_t lease = block->lease();
  if (lease == 0) return nb::cast(PyBlock{std::move(block)});
  return nb::cast(
      PyLeasedBuffer{LeaseHolder::make({.connection = kAnyConnection, .lease = lease, .memory = std::move(block)})});
}

void init_buffer_leases(nb::module_& m) {
  nb::class_<PyLeasedBuffer>(m, "LeasedBuffer", nb::type_slots(slots),
                             "Memory leased from a link for a tensor to be sent over it.\n\n"
                             "64-byte aligned and writable.");
}

}  // namespace telegrad::python
