// Python references held by the core. The core drops them on any thread without the GIL, so the decref is deferred to
// the next call of the binding. A pool thread may sleep after dropping some, so it requests a callback: an idle worker
// must not keep alive what it has sent.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
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

  /// Needs the GIL.
  void add(nanobind::handle object) {
    object.inc_ref();
    objects_.push_back(object.ptr());
  }
  /// Releases the reference at an index. Needs the GIL and no lock of the core.
  void drop(std::size_t index) {
    in_python([&] { Py_DECREF(std::exchange(objects_[index], Py_NewRef(Py_None))); });
  }
  /// Keeps memory that is no Python object. It may be destroyed on any thread.
  void hold(std::shared_ptr<void> memory) { memory_.push_back(std::move(memory)); }
  PyObject* front() const { return objects_.front(); }
  PyObject* at(std::size_t index) const { return objects_[index]; }
  bool empty() const { return objects_.empty(); }

  /// Records the version of a tensor that one of the objects owns, for `is_unchanged`.
  void add_version(PyObject* tensor, long version) { versions_.emplace_back(tensor, version); }
  /// Records where the memory of a storage is, for `is_unchanged`. Returns false if it does not say.
  bool add_storage(PyObject* storage);
  /// Records samples of memory that the objects own, for `is_unchanged`.
  void add_samples(const std::byte* data, std::size_t size);
  /// Takes the GIL. See python/tensor_versions.h.
  bool is_unchanged() const override;
  bool read(const std::byte* from, std::size_t size, std::byte* to) const override;

  /// Releases all references. Needs the GIL and no lock of the core.
  void release() {
    versions_.clear();
    storages_.clear();
    samples_.clear();
    in_python([this] {
      for (PyObject* o : std::exchange(objects_, {})) Py_DECREF(o);
    });
  }

 private:
  struct Storage {
    PyObject* object;
    long long address;
    long long size;
  };
  struct Samples {
    const std::byte* data;
    std::size_t size;
    std::uint64_t hash;
  };

  std::vector<PyObject*> objects_;
  std::vector<std::shared_ptr<void>> memory_;
  std::vector<std::pair<PyObject*, long>> versions_;
  std::vector<Storage> storages_;
  std::vector<Samples> samples_;
};

/// Scope in which a decref that this thread defers wakes a pool thread of the engine, which runs it.
class WakePoolOnDecref {
 public:
  explicit WakePoolOnDecref(Engine& engine);
  ~WakePoolOnDecref();
  WakePoolOnDecref(const WakePoolOnDecref&) = delete;
  WakePoolOnDecref& operator=(const WakePoolOnDecref&) = delete;
};

/// Runs the deferred decrefs. Needs the GIL and no lock of the core.
void decref_deferred();

}  // namespace telegrad::python
