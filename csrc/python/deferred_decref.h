// Python references held by the core. The core drops them on any thread and without the GIL, so they are only put
// aside there; the next binding call releases them. A pool thread that drops some may go to sleep afterwards, so it
// asks for one: an idle worker must not hold on to what it has sent.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "codec/gil.h"
#include "core/engine.h"
#include "core/message.h"

namespace telegrad::python {

class PyRefs final : public KeepAlive {
 public:
  PyRefs() = default;
  ~PyRefs() override;

  /// With the GIL held.
  void add(nanobind::handle object) {
    object.inc_ref();
    objects_.push_back(object.ptr());
  }
  /// Gives up one, by its number. With the GIL held and no lock of the core.
  void drop(std::size_t index) {
    in_python([&] { Py_DECREF(std::exchange(objects_[index], Py_NewRef(Py_None))); });
  }
  /// Something that is no object, and may be destroyed on any thread.
  void hold(std::shared_ptr<void> memory) { memory_.push_back(std::move(memory)); }
  PyObject* front() const { return objects_.front(); }
  bool empty() const { return objects_.empty(); }

  /// Gives all up at once. With the GIL held and no lock of the core.
  void release() {
    in_python([this] {
      for (PyObject* o : std::exchange(objects_, {})) Py_DECREF(o);
    });
  }

 private:
  std::vector<PyObject*> objects_;
  std::vector<std::shared_ptr<void>> memory_;
};

/// While it lives, references that this thread puts aside have a pool thread of the engine woken, to release them.
class WakePoolOnDecref {
 public:
  explicit WakePoolOnDecref(Engine& engine);
  ~WakePoolOnDecref();
  WakePoolOnDecref(const WakePoolOnDecref&) = delete;
  WakePoolOnDecref& operator=(const WakePoolOnDecref&) = delete;
};

/// Releases what has been put aside. With the GIL held and no lock of the core.
void decref_deferred();

}  // namespace telegrad::python
