#include "python/tensor_versions.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>

#include "codec/gil.h"
#include "python/deferred_decref.h"

namespace telegrad::python {
namespace {

namespace nb = nanobind;

// About as many cache misses as the memory has pages, but no more than take a microsecond.
constexpr std::size_t kSampleDistance = 4 << 10;
constexpr std::size_t kMaxSamples = 32;

/// Returns a hash of some bytes at even distances.
std::uint64_t hash_of_samples(const std::byte* data, std::size_t size) {
  std::uint64_t hash = 0, word = 0;
  if (size < sizeof word) return 0;
  const std::size_t last = size - sizeof word, n = std::min(last / kSampleDistance + 1, kMaxSamples);
  for (std::size_t i = 1; i <= n; ++i) {
    std::memcpy(&word, data + last / n * i, sizeof word);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;  // odd: no difference is lost
    hash ^= hash >> 32;
  }
  return hash;
}

/// Returns the version of a tensor; -1 without one.
long version_of(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("_version");
  const nb::object version = nb::steal(in_python([&] { return PyObject_GetAttr(tensor, name); }));
  const long number = version.is_valid() ? PyLong_AsLong(version.ptr()) : -1;
  if (number < 0) PyErr_Clear();
  return number;
}

/// Returns how many references a storage has, its Python object and its tensors; -1 if torch does not say.
long references_of(PyObject* storage) {
  nb::object count = nb::steal(in_python([&]() -> PyObject* {
    const nb::object torch = nb::steal(PyImport_ImportModule("torch._C"));
    if (!torch.is_valid()) return nullptr;
    const nb::object count_of = nb::steal(PyObject_GetAttrString(torch.ptr(), "_storage_Use_Count"));
    const nb::object number = nb::steal(PyObject_GetAttrString(storage, "_cdata"));
    if (!count_of.is_valid() || !number.is_valid()) return nullptr;
    return PyObject_CallOneArg(count_of.ptr(), number.ptr());
  }));
  const long number = count.is_valid() ? PyLong_AsLong(count.ptr()) : -1;
  if (number < 0) PyErr_Clear();
  return number;
}

/// Returns what a method of a storage returns, a number; -1 without one.
long long number_of(PyObject* storage, const char* method) {
  const nb::object number = nb::steal(in_python([&] { return PyObject_CallMethod(storage, method, nullptr); }));
  const long long value = number.is_valid() ? PyLong_AsLongLong(number.ptr()) : -1;
  if (value < 0) PyErr_Clear();
  return value;
}

/// Numbers of references to a tensor's storage and its Python object.
struct StorageHolders {
  bool operator==(const StorageHolders&) const = default;
  Py_ssize_t object = 0;
  long storage = 0;
};

StorageHolders holders_of(PyObject* storage) { return {Py_REFCNT(storage), references_of(storage)}; }

/// Returns these numbers for a tensor that no other code holds. Torch itself may hold the Python object.
StorageHolders least_holders(PyTypeObject* type) {
  const nb::object tensor =
      nb::steal(in_python([&] { return PyObject_CallNoArgs(reinterpret_cast<PyObject*>(type)); }));
  nb::object storage;
  if (tensor.is_valid())
    storage = nb::steal(in_python([&] { return PyObject_CallMethod(tensor.ptr(), "untyped_storage", nullptr); }));
  if (storage.is_valid()) return holders_of(storage.ptr());
  PyErr_Clear();
  return {};
}

/// Returns whether no other code holds the memory of an owner: then none can change it.
bool is_only_holder(PyObject* owner) {
  PyObject *const storage = PyTuple_GET_ITEM(owner, 0), *const tensor = PyTuple_GET_ITEM(owner, 1);
  if (PyTuple_GET_SIZE(owner) != 2 || Py_REFCNT(owner) != 1 || Py_REFCNT(tensor) != 1) return false;
  const StorageHolders found = holders_of(storage);
  return found.storage > 0 && found == least_holders(Py_TYPE(tensor));
}

bool record(PyRefs& refs, PyObject* owner) {
  if (PyBytes_CheckExact(owner)) return true;
  if (!PyTuple_CheckExact(owner) || PyTuple_GET_SIZE(owner) < 2) return false;
  for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(owner); ++i) {
    PyObject* const tensor = PyTuple_GET_ITEM(owner, i);
    const long version = version_of(tensor);
    if (version < 0) return is_only_holder(owner) && refs.add_storage(PyTuple_GET_ITEM(owner, 0));
    refs.add_version(tensor, version);
  }
  return refs.add_storage(PyTuple_GET_ITEM(owner, 0));
}

}  // namespace

void record_versions(Outgoing& m) {
  if (!m.owner || m.immutable) return;
  auto& refs = static_cast<PyRefs&>(*m.owner);
  m.verifiable = true;
  for (std::size_t i = 0; i < m.segments.size() && m.verifiable; ++i)
    m.verifiable = record(refs, refs.at(1 + i));  // the body is the first
  if (!m.verifiable) return;
  for (const OutSegment& s : m.segments) refs.add_samples(s.data, s.size);
}

void PyRefs::add_samples(const std::byte* data, std::size_t size) {
  samples_.push_back({data, size, hash_of_samples(data, size)});
}

bool PyRefs::add_storage(PyObject* storage) {
  const long long address = number_of(storage, "data_ptr"), size = number_of(storage, "nbytes");
  storages_.push_back({storage, address, size});
  return address > 0 && size > 0;
}

bool PyRefs::is_unchanged() const {
  const GilHeld gil;
  for (const Storage& s : storages_) {  // first: a storage that was resized has freed the memory
    if (number_of(s.object, "data_ptr") != s.address || number_of(s.object, "nbytes") < s.size) return false;
  }
  for (const auto& [tensor, version] : versions_) {
    if (version_of(tensor) != version) return false;
  }
  return std::ranges::all_of(samples_, [](const Samples& s) { return hash_of_samples(s.data, s.size) == s.hash; });
}

bool PyRefs::read(const std::byte* from, std::size_t size, std::byte* to) const {
  const GilHeld gil;  // no other thread frees the memory meanwhile
  if (!is_unchanged()) return false;
  std::memcpy(to, from, size);
  return true;
}

}  // namespace telegrad::python
