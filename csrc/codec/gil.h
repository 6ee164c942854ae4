// Access to the GIL for threads that may outlive the interpreter.
//
// When a daemon thread requests the GIL of a finalizing interpreter, CPython ends the thread at once by unwinding its
// stack (3.14 blocks it forever instead). C++ destructors and handlers on this stack crash the process, or use Python
// without the GIL. So C++ code that releases the GIL, or lets Python code run, uses the functions below: the thread
// then blocks forever inside them, and the process ends without it.
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

/// Runs a function that may run Python code or request the GIL. Costs nothing.
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

/// Releases the GIL for its scope. The thread must have it.
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

/// Takes the GIL for its scope, whether the thread has it or not.
class GilHeld {
 public:
  GilHeld() : state_(in_python(PyGILState_Ensure)) {}
  ~GilHeld() { PyGILState_Release(state_); }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  PyGILState_STATE state_;
};

/// Calls like PyObject_CallFunctionObjArgs. Errors are Python's.
template <class... Args>
PyObject* call_python(PyObject* function, Args*... args) {
  return in_python([&] { return PyObject_CallFunctionObjArgs(function, args..., nullptr); });
}

}  // namespace telegrad
