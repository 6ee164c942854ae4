// Signals that arrive while Python's main thread waits in the core.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>

namespace telegrad::bind {

/// The thread that Python delivers signals to.
inline unsigned long main_thread() {
  static const unsigned long id =
      nanobind::cast<unsigned long>(nanobind::module_::import_("threading").attr("main_thread")().attr("ident"));
  return id;
}

/// What the core asks while Python's main thread waits in it. Once a signal handler has raised, the exception is this
/// thread's: no more may be waited for.
class Interruption {
 public:
  std::function<bool()> ask() {
    if (PyThread_get_thread_ident() != main_thread()) return {};
    return [this] {
      nanobind::gil_scoped_acquire gil;
      raised_ = raised_ || PyErr_CheckSignals() != 0;
      return raised_;
    };
  }
  bool raised() const { return raised_; }

 private:
  bool raised_ = false;
};

}  // namespace telegrad::bind
