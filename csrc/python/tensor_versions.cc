#include "python/tensor_versions.h"

#include <nanobind/nanobind.h>

#include "codec/gil.h"
#include "python/deferred_decref.h"

namespace telegrad::python {
namespace {

namespace nb = nanobind;

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

/// Returns whether no other code holds the memory of an owner: then none can change it.
bool is_only_holder(PyObject* owner) {
  PyObject* const storage = PyTuple_GET_ITEM(owner, 0);
  if (PyTuple_GET_SIZE(owner) != 2 || Py_REFCNT(owner) != 1) return false;
  return Py_REFCNT(storage) == 1 && Py_REFCNT(PyTuple_GET_ITEM(owner, 1)) == 1 && references_of(storage) == 2;
}

bool record(PyRefs& refs, PyObject* owner) {
  if (PyBytes_CheckExact(owner)) return true;
  if (!PyTuple_CheckExact(owner) || PyTuple_GET_SIZE(owner) < 2) return false;
  for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(owner); ++i) {
    PyObject* const tensor = PyTuple_GET_ITEM(owner, i);
    const long version = version_of(tensor);
    if (version < 0) return is_only_holder(owner);
    refs.add_version(tensor, version);
  }
  return true;
}

}  // namespace

void record_versions(Outgoing& m) {
  if (!m.owner || m.immutable) return;
  auto& refs = static_cast<PyRefs&>(*m.owner);
  m.verifiable = true;
  for (std::size_t i = 0; i < m.segments.size() && m.verifiable; ++i)
    m.verifiable = record(refs, refs.at(1 + i));  // the body is the first
}

bool PyRefs::is_unchanged() const {
  const GilHeld gil;
  for (const auto& [tensor, version] : versions_) {
    if (version_of(tensor) != version) return false;
  }
  return true;
}

}  // namespace telegrad::python
