// Converts completions of calls to values and exceptions of the program. No other code does.
#pragma once

#include <nanobind/nanobind.h>

#include "codec/codec.h"
#include "core/engine.h"
#include "python/messages.h"
#include "python/metadata.h"

namespace telegrad::python {

/// Decodes the value of a message. `wrap`: see `Codec::decode`; may be not valid. Throws nb::python_error.
nb::object decode_body(const codec::Codec& codec, Incoming& message, const nb::object& wrap = {});

/// Completes calls of one worker. All with the GIL held.
class Completions {
 public:
  /// `calls`: telegrad.worker.calls.client.Calls. `future_type`: CallFuture.
  Completions(const codec::Codec& codec, const AutogradHooks& autograd, nb::handle calls, nb::object future_type);

  /// Returns the value of a call. `context`: the caller's autograd context, or None; `label`: the function, or its name
  /// in error texts. Throws nb::python_error: the call failed.
  nb::object value(Completion&& completion, nb::handle context, nb::handle label, Nanos timeout) const;

  /// Completes a CallFuture; calls any other target with the completion. Returns the value if the codec decoded it.
  /// Throws nb::python_error for an exception that came after the future was done, such as KeyboardInterrupt.
  nb::object complete(nb::handle target, Completion&& completion) const;
  /// Completes a future with an error. Throws nb::python_error likewise.
  void fail(nb::handle future, const nb::object& error) const;

  int traverse(visitproc visit, void* arg) const;
  void clear() { future_type_ = set_result_ = result_ = finish_ = fail_ = {}; }

 private:
  const codec::Codec& codec_;
  const AutogradHooks& autograd_;
  nb::object future_type_;
  nb::object set_result_;  // set_result(future, value)
  nb::object result_;      // Calls.result(completion, (peer, label, timeout)) -> value
  nb::object finish_;      // Calls.finish(future, completion)
  nb::object fail_;        // Calls.fail(future, error)
};

}  // namespace telegrad::python
