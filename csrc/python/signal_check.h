// Signals that arrive while Python's main thread waits in the core.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <functional>

#include "codec/gil.h"

namespace telegrad::python {

/// The thread that Python delivers signals to. Found once, but by no static's own initialization: that runs Python
/// here, which may let another thread in, and that one would wait for the initialization with the GIL.
inline unsigned long main_thread() {
  static std::atomic<unsigned long> known = 0;
  unsigned long id = known.load(std::memory_order_relaxed);
  if (id == 0) {
    id = nanobind::cast<unsigned long>(nanobind::module_::import_("threading").attr("main_thread")().attr("ident"));
    known.store(id, std::memory_order_relaxed);
  }
  return id;
}

/// What the core asks while Python's main thread waits in it. Once a signal handler has raised, the exception is this
/// thread's: no more may be waited for.
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

 private:
  bool raised_ = false;
};

}  // namespace telegrad::python
