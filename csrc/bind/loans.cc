#include "bind/loans.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bind/block.h"
#include "bind/keep.h"
#include "core/forks.h"

namespace telegrad::bind {
namespace {

namespace nb = nanobind;

constexpr std::uint64_t kAnyLink = 0;  // no connection has this number: the link finds out whether memory is its own

class Held;

/// All that tensors may lie in, by address. What a message alone has is not: it can come back while the message is
/// still here, in other parts than it left in.
struct Registry {
  struct Entry {
    const Held* of;
    std::weak_ptr<Held> held;
  };
  std::mutex mutex;
  std::map<std::uintptr_t, Entry> loans;
  std::atomic<std::size_t> count = 0;
};

Registry& registry() {
  static auto* r = new Registry;  // never destroyed: tensors may outlive static objects
  return *r;
}

[[maybe_unused]] const bool held = hold_at_forks(registry().mutex);

std::uintptr_t address_of(const std::byte* data) { return reinterpret_cast<std::uintptr_t>(data); }

/// One loan, held by the tensors over it and by messages. May be destroyed on any thread.
class Held {
 public:
  static std::shared_ptr<Held> make(Loan loan) {
    auto made = std::make_shared<Held>(std::move(loan));
    Registry& r = registry();
    std::lock_guard lock(r.mutex);
    r.loans[address_of(made->loan.memory->data())] = {made.get(), made};
    return made;
  }
  /// The one that some bytes lie in, or null.
  static std::shared_ptr<Held> of(const std::byte* data, std::uint64_t size) {
    Registry& r = registry();
    std::shared_ptr<Held> found;  // let go of without the lock, if it is not
    std::lock_guard lock(r.mutex);
    const auto next = r.loans.upper_bound(address_of(data));
    if (next == r.loans.begin()) return nullptr;
    found = std::prev(next)->second.held.lock();
    if (!found) return nullptr;
    const Block& memory = *found->loan.memory;
    return data + size <= memory.data() + memory.size() ? found : nullptr;
  }

  explicit Held(Loan loan) : loan(std::move(loan)) { registry().count.fetch_add(1, std::memory_order_relaxed); }
  ~Held() {
    withdraw();
    registry().count.fetch_sub(1, std::memory_order_relaxed);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  /// No tensor lies in it any more.
  void withdraw() const {
    Registry& r = registry();
    std::lock_guard lock(r.mutex);
    const auto found = r.loans.find(address_of(loan.memory->data()));
    if (found != r.loans.end() && found->second.of == this) r.loans.erase(found);
  }

  const Loan loan;
};

/// `_core.Lent`: what tensors are made over.
struct PyLent {
  std::shared_ptr<Held> held;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Block& block = *nb::inst_ptr<PyLent>(self)->held->loan.memory;
  return PyBuffer_FillInfo(view, self, block.data(), static_cast<Py_ssize_t>(block.size()), 0, flags);
}

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

}  // namespace

bool any_loans() { return registry().count.load(std::memory_order_relaxed) > 0; }

void give_loans(Outgoing& m, std::uint64_t connection) {
  if (!any_loans() || !m.keep || m.owned) return;
  auto& keep = static_cast<References&>(*m.keep);
  std::vector<std::pair<OutSegment*, std::shared_ptr<Held>>> mine;
  for (std::size_t i = 0; i < m.segments.size(); ++i) {
    OutSegment& s = m.segments[i];
    auto one = Held::of(s.data, s.size);
    if (!one || (one->loan.connection != kAnyLink && one->loan.connection != connection)) continue;
    mine.emplace_back(&s, std::move(one));
    keep.drop(1 + i);  // the body is the first
  }
  for (auto& [segment, one] : mine) {
    const Loan& loan = one->loan;
    // A little of what has come would keep all of it from being used again; what was lent somebody has asked for.
    const bool too_little = loan.connection == kAnyLink && segment->size < loan.memory->size() / 2;
    if (one.use_count() > 1 || too_little) continue;
    one->withdraw();
    segment->lease = loan.lease;
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // whoever let go of one has done with it
  for (auto& [segment, one] : mine) keep.hold(std::move(one));
}

nb::object lend(Engine& engine, std::int32_t peer, std::uint64_t connection, std::size_t size) {
  auto loan = engine.lend(peer, connection, size);
  return loan ? nb::cast(PyLent{Held::make(std::move(*loan))}) : nb::none();
}

codec::SegmentMemory memory_of(BlockPtr block) {
  std::byte* const data = block->data();
  const std::size_t size = block->size();
  if (const std::uint64_t lease = block->lease()) {
    auto held = Held::make({.connection = kAnyLink, .lease = lease, .memory = std::move(block)});
    return {data, size, new std::shared_ptr<Held>(std::move(held)),
            [](void* context) noexcept { delete static_cast<std::shared_ptr<Held>*>(context); }};
  }
  return {data, size, block.release(), [](void* context) noexcept { delete static_cast<Block*>(context); }};
}

nb::object object_of(BlockPtr block) {
  const std::uint64_t lease = block->lease();
  if (lease == 0) return nb::cast(PyBlock{std::move(block)});
  return nb::cast(PyLent{Held::make({.connection = kAnyLink, .lease = lease, .memory = std::move(block)})});
}

void init_loans(nb::module_& m) {
  nb::class_<PyLent>(m, "Lent", nb::type_slots(slots),
                     "Memory that a link has lent, 64-byte aligned and writable, for a tensor that is to go over it.");
}

}  // namespace telegrad::bind
