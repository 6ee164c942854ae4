// The GIL where threads may outlive the interpreter.
//
// A daemon thread that asks an ending interpreter for its GIL is ended on the spot, by an unwinding of its stack (3.14
// lets it hang instead). Destructors and handlers of C++ on the way bring down the process, or touch Python without the
// GIL. So C++ that gives up the GIL, or lets Python code run, does so by what stands here: the thread stops right
// there, for good, and the process ends without it.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <utility>

namespace telegrad {

[[noreturn]] inline void stop_for_good() {
  while (true) ::pause();
}

inline bool interpreter_is_ending() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

/// Runs what may run Python code, or ask for the GIL. Costs nothing.
template <class F>
decltype(auto) in_python(F&& run) {
#if PY_VERSION_HEX >= 0x030e0000
  return std::forward<F>(run)();
#else
  try {
    return std::forward<F>(run)();
  } catch (abi::__forced_unwind&) {
    stop_for_good();
  }
#endif
}

/// While it lives the thread, which has had the GIL, has it not.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    in_python([this] { PyEval_RestoreThread(state_); });
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

/// While it lives the thread has the GIL, whether it had it before or not.
class GilHeld {
 public:
  GilHeld() : state_(in_python(PyGILState_Ensure)) {}
  ~GilHeld() { PyGILState_Release(state_); }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  PyGILState_STATE state_;
};

/// As PyObject_CallFunctionObjArgs. Errors are Python's.
template <class... Args>
PyObject* call_python(PyObject* function, Args*... args) {
  return in_python([&] { return PyObject_CallFunctionObjArgs(function, args..., nullptr); });
}

}  // namespace telegrad
