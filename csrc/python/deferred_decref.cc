#include "python/deferred_decref.h"

#include <atomic>
#include <mutex>

#include "base/fork_handlers.h"
#include "codec/gil.h"

namespace telegrad::python {
namespace {

// How long an idle worker keeps what it has sent. The callback costs as much as a call, and further calls make it
// needless.
constexpr Nanos kMaxDelay = 20 * kMillisecond;

struct Deferred {
  std::mutex mutex;
  std::vector<PyObject*> objects;
  std::atomic<bool> any = false;
};

Deferred& deferred() {
  static auto* p = new Deferred;  // never destroyed: threads may outlive static destruction
  return *p;
}

[[maybe_unused]] const bool holder = lock_at_fork(deferred().mutex);

thread_local Engine* wake_pool = nullptr;

}  // namespace

WakePoolOnDecref::WakePoolOnDecref(Engine& engine) { wake_pool = &engine; }

WakePoolOnDecref::~WakePoolOnDecref() { wake_pool = nullptr; }

PyRefs::~PyRefs() {
  if (objects_.empty()) return;
  Deferred& p = deferred();
  {
    std::lock_guard lock(p.mutex);
    p.objects.insert(p.objects.end(), objects_.begin(), objects_.end());
    p.any.store(true, std::memory_order_release);
  }
  if (wake_pool != nullptr) wake_pool->request_callback(kMaxDelay);
}

void decref_deferred() {
  Deferred& p = deferred();
  if (!p.any.load(std::memory_order_acquire)) return;
  std::vector<PyObject*> objects;
  {
    std::lock_guard lock(p.mutex);
    objects.swap(p.objects);
    p.any.store(false, std::memory_order_release);
  }
  in_python([&] {
    for (PyObject* o : objects) Py_DECREF(o);
  });
}

}  // namespace telegrad::python
