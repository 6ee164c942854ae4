// Completions of calls as values: the one place that turns what came of a call into what the program gets.
#pragma once

#include <nanobind/nanobind.h>

#include "codec/codec.h"
#include "core/engine.h"
#include "python/messages.h"
#include "python/metadata.h"

namespace telegrad::python {

/// The value in a message. `wrap`: see `Codec::decode`, or not valid. Throws nb::python_error.
nb::object decode_body(const codec::Codec& codec, Incoming& message, const nb::object& wrap = {});

/// Completes calls of one worker. All with the GIL held.
class Completions {
 public:
  /// `calls`: telegrad.worker.calls.client.Calls. `future_type`: CallFuture.
  Completions(const codec::Codec& codec, const AutogradHooks& autograd, nb::handle calls, nb::object future_type);

  /// The value of a call, or what it raised. `context`: the caller's autograd context, or None; `label`: the function,
  /// or what errors call it. Throws nb::python_error.
  nb::object value(Completion&& completion, nb::handle context, nb::handle label, Nanos timeout) const;

  /// Completes a CallFuture; any other target is called with the outcome. Returns the value if it was decoded here.
  /// Throws nb::python_error: what the program must hear though the future has ended, such as KeyboardInterrupt.
  nb::object complete(nb::handle target, Completion&& completion) const;
  /// Completes a future with an error that its value could not be read for. Throws nb::python_error likewise.
  void fail(nb::handle future, const nb::object& error) const;

  int traverse(visitproc visit, void* arg) const;
  void clear() { future_type_ = set_result_ = result_ = finish_ = fail_ = {}; }

 private:
  const codec::Codec& codec_;
  const AutogradHooks& autograd_;
  nb::object future_type_;
  nb::object set_result_;  // set_result(future, value)
  nb::object result_;      // Calls.result(outcome, (peer, label, timeout)) -> value
  nb::object finish_;      // Calls.finish(future, outcome)
  nb::object fail_;        // Calls.fail(future, error)
};

}  // namespace telegrad::python
