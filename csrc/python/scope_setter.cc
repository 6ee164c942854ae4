#include "python/scope_setter.h"

#include <utility>

#include "wire/constants.h"

namespace telegrad::python {

using Field = wire::ScopeField;

ScopeSetter::ScopeSetter(nb::object worker, nb::object type, nb::object current, nb::object in_callbacks)
    : worker_(std::move(worker)),
      type_(std::move(type)),
      current_(std::move(current)),
      in_callbacks_(std::move(in_callbacks)),
      limits_calls_(nb::cast<bool>(worker_.attr("options").attr("inherit_from_caller"))) {}

void ScopeSetter::set(PyObject* scope) const {
  thread_local bool is_set = false;
  if (!scope && !is_set) return;
  is_set = scope != nullptr;
  PyObject* token = PyContextVar_Set(current_.ptr(), scope ? scope : Py_None);
  if (!token) PyErr_WriteUnraisable(current_.ptr());
  Py_XDECREF(token);
}

/// Creates the scope without the slow Python constructor.
void ScopeSetter::enter_request(Nanos deadline, const nb::object& context, std::uint64_t connection, std::uint64_t call,
                                std::uint32_t depth) const {
  auto* type = reinterpret_cast<PyTypeObject*>(type_.ptr());
  const nb::object scope = nb::steal(type->tp_alloc(type, Field::kCount));
  PyObject* until = PyLong_FromLongLong(deadline);
  PyObject* over = PyLong_FromUnsignedLongLong(connection);
  PyObject* id = PyLong_FromUnsignedLongLong(call);
  PyObject* below = PyLong_FromUnsignedLong(depth);
  if (!scope.is_valid() || !until || !over || !id || !below) throw nb::python_error();
  PyTuple_SET_ITEM(scope.ptr(), Field::kWorker, nb::object(worker_).release().ptr());
  PyTuple_SET_ITEM(scope.ptr(), Field::kDeadline, until);
  PyTuple_SET_ITEM(scope.ptr(), Field::kDepth, below);
  PyTuple_SET_ITEM(scope.ptr(), Field::kRequest, nb::bool_(true).release().ptr());
  PyTuple_SET_ITEM(scope.ptr(), Field::kAutograd, Py_NewRef(context.ptr()));
  PyTuple_SET_ITEM(scope.ptr(), Field::kConnection, over);
  PyTuple_SET_ITEM(scope.ptr(), Field::kCall, id);
  PyTuple_SET_ITEM(scope.ptr(), Field::kChain, nb::int_(0).release().ptr());
  PyTuple_SET_ITEM(scope.ptr(), Field::kLimitsCalls, nb::bool_(limits_calls_).release().ptr());
  set(scope.ptr());
}

int ScopeSetter::traverse(visitproc visit, void* arg) const {
  for (const nb::object* o : {&worker_, &type_, &current_, &in_callbacks_}) Py_VISIT(o->ptr());
  return 0;
}

}  // namespace telegrad::python
