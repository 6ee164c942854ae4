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
        "A function of one argument for torch to call. If the interpreter ends while a daemon thread is in it, that\n"
        "thread stops for good: torch's frames around it do not survive the way in which Python ends the thread.");
}

}  // namespace telegrad::python
