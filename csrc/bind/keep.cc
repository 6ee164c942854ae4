#include "bind/keep.h"

#include <atomic>
#include <mutex>

#include "codec/gil.h"
#include "core/forks.h"

namespace telegrad::bind {
namespace {

struct PutAside {
  std::mutex mutex;
  std::vector<PyObject*> objects;
  std::atomic<bool> any = false;
};

PutAside& put_aside() {
  static auto* p = new PutAside;  // never destroyed: threads may outlive static destruction
  return *p;
}

[[maybe_unused]] const bool held = hold_at_forks(put_aside().mutex);

thread_local Engine* wakes = nullptr;

}  // namespace

WakesForReferences::WakesForReferences(Engine& engine) { wakes = &engine; }

WakesForReferences::~WakesForReferences() { wakes = nullptr; }

References::~References() {
  if (objects_.empty()) return;
  PutAside& p = put_aside();
  {
    std::lock_guard lock(p.mutex);
    p.objects.insert(p.objects.end(), objects_.begin(), objects_.end());
    p.any.store(true, std::memory_order_release);
  }
  if (wakes != nullptr) wakes->nudge(kMillisecond);
}

void release_references() {
  PutAside& p = put_aside();
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

}  // namespace telegrad::bind
