#include "python/callbacks.h"

#include "codec/gil.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace telegrad::python {
namespace {

PyObject* run(PyObject* callback, PyObject* argument) { return call_python(callback, argument); }

PyMethodDef definition = {"callback", run, METH_O, nullptr};

nb::object shielded(nb::handle callback) {
  PyObject* made = PyCFunction_New(&definition, callback.ptr());
  if (!made) nb::raise_python_error();
  return nb::steal(made);
}

}  // namespace

void init_callbacks(nb::module_& m) {
  m.def("shielded", shielded, "callback"_a,
        nb::sig("def shielded(callback: collections.abc.Callable[[typing.Any], typing.Any]) -> "
                "collections.abc.Callable[[typing.Any], typing.Any]"),
        "Wrap a function of one argument that torch calls.\n\n"
        "If the interpreter finalizes while a daemon thread runs it, that thread blocks forever: torch's C++\n"
        "frames would not survive that Python unwinds the thread's stack.");
}

}  // namespace telegrad::python
