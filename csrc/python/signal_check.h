// Signals that arrive while Python's main thread waits in the core.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <functional>

#include "codec/gil.h"

namespace telegrad::python {

/// Returns the id of Python's main thread, in which signal handlers run. Not the initializer of a static: it runs
/// Python code, during which another thread may take the GIL and wait, with the GIL, for the initialization.
inline unsigned long main_thread() {
  static std::atomic<unsigned long> known = 0;
  unsigned long id = known.load(std::memory_order_relaxed);
  if (id == 0) {
    id = nanobind::cast<unsigned long>(nanobind::module_::import_("threading").attr("main_thread")().attr("ident"));
    known.store(id, std::memory_order_relaxed);
  }
  return id;
}

/// Runs Python's signal handlers while the main thread waits in the core. Once a handler has raised, the exception is
/// set in this thread, which must not wait again.
class SignalCheck {
 public:
  std::function<bool()> ask() {
    if (PyThread_get_thread_ident() != main_thread()) return {};
    return [this] {
      const GilHeld gil;
      raised_ = raised_ || PyErr_CheckSignals() != 0;
      return raised_;
    };
  }
  bool raised() const { return raised_; }
  /// Sets an exception that a signal handler has raised elsewhere in this thread. Needs the GIL.
  void raise(nanobind::python_error& error) {
    error.restore();
    raised_ = true;
  }

 private:
  bool raised_ = false;
};

}  // namespace telegrad::python
