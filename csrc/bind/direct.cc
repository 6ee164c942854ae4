#include "bind/direct.h"

#include <utility>

#include "bind/errors.h"
#include "codec/gil.h"

namespace telegrad::bind {
namespace {

enum KnownField : Py_ssize_t { kNumber, kText, kHome, kModule, kName, kPath, kFields };

/// Is it what this function without arguments returns? Throws nb::python_error.
bool says(PyObject* function, PyObject* what) {
  const nb::object said = nb::steal(PyObject_CallNoArgs(function));
  if (!said.is_valid()) throw nb::python_error();
  return said.ptr() == what;
}

/// The value of a key, or null. Throws nb::python_error.
PyObject* find(nb::handle dict, nb::handle key) {
  PyObject* found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (!found && PyErr_Occurred()) throw nb::python_error();
  return found;
}

void set(nb::handle object, nb::handle name, nb::handle value) {
  if (PyObject_SetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) throw nb::python_error();
}

}  // namespace

Direct::Direct(Surroundings around)
    : around_(std::move(around)),
      id_(interned("id")),
      unusual_(interned("unusual")),
      calls_(interned("_calls")),
      request_(interned("_request")),
      call_(interned("_call")) {}

bool Direct::address(nb::handle to, nb::handle function, Addressed& out) const {
  return is_usual() && find_peer(to, out.peer) && find_name(function, out);
}

/// Does this thread run no request, and nothing that changes what a call is?
bool Direct::is_usual() const {
  PyObject* scope = nullptr;
  if (PyContextVar_Get(around_.current.ptr(), nullptr, &scope) != 0) throw nb::python_error();
  Py_XDECREF(scope);
  if (scope != nullptr && scope != Py_None) return false;
  PyObject* unusual = find(around_.profiling, unusual_);
  return unusual && says(unusual, Py_False) && says(around_.is_grad_enabled.ptr(), Py_True);
}

bool Direct::find_peer(nb::handle to, std::int32_t& peer) const {
  nb::object key = nb::borrow(to);
  if (Py_TYPE(to.ptr()) == reinterpret_cast<PyTypeObject*>(around_.info_type.ptr())) {
    key = nb::steal(PyObject_GetAttr(to.ptr(), id_.ptr()));
    if (!key.is_valid()) throw nb::python_error();
  } else if (!PyUnicode_CheckExact(to.ptr()) && !PyLong_CheckExact(to.ptr())) {
    return false;
  }
  PyObject* info = find(around_.infos, key);
  if (!info) return false;
  const nb::object id = nb::steal(PyObject_GetAttr(info, id_.ptr()));
  const long number = id.is_valid() ? PyLong_AsLong(id.ptr()) : -1;
  if (number == -1 && PyErr_Occurred()) throw nb::python_error();
  peer = static_cast<std::int32_t>(number);
  return true;
}

/// `NameTable.find` of a function that it has found before, and that stands where it stood then.
bool Direct::find_name(nb::handle function, Addressed& out) const {
  if (PySet_GET_SIZE(around_.by_value.ptr()) != 0) return false;
  PyObject* known = in_python([&] { return PyDict_GetItemWithError(around_.known.ptr(), function.ptr()); });
  if (!known && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
  if (!known) {
    PyErr_Clear();  // it is not hashable
    return false;
  }
  if (!PyTuple_Check(known) || PyTuple_GET_SIZE(known) != kFields) return false;
  PyObject* home = PyTuple_GET_ITEM(known, kHome);
  if (home != Py_None && find(home, PyTuple_GET_ITEM(known, kName)) != function.ptr()) return false;
  out.number = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(PyTuple_GET_ITEM(known, kNumber)));
  out.text = nb::borrow(PyTuple_GET_ITEM(known, kText));
  return true;
}

nb::object Direct::future(nb::handle calls, nb::handle function, std::int32_t peer, nb::handle timeout) const {
  nb::object future = nb::steal(call_python(around_.future_type.ptr(), around_.no_devices.ptr()));
  const nb::object number = nb::steal(PyLong_FromLong(peer));
  const nb::object request = nb::steal(PyTuple_Pack(3, number.ptr(), function.ptr(), timeout.ptr()));
  if (!future.is_valid() || !request.is_valid()) throw nb::python_error();
  set(future, calls_, calls);
  set(future, request_, request);
  return future;
}

void Direct::set_call(nb::handle future, std::uint64_t id) const {
  const nb::object number = nb::steal(PyLong_FromUnsignedLongLong(id));
  set(future, call_, number);
}

bool Direct::in_event_loop() const { return !says(around_.running_loop.ptr(), Py_None); }

int Direct::traverse(visitproc visit, void* arg) const {
  for (const nb::object* o :
       {&around_.current, &around_.infos, &around_.info_type, &around_.known, &around_.by_value, &around_.profiling,
        &around_.is_grad_enabled, &around_.running_loop, &around_.future_type, &around_.no_devices}) {
    Py_VISIT(o->ptr());
  }
  return 0;
}

}  // namespace telegrad::bind
