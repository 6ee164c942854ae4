// Runs a request at its callee: read the metadata, decode, wait for references, run, reply. Python decodes and encodes
// what the codec cannot.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "codec/codec.h"
#include "codec/gil.h"
#include "core/engine.h"
#include "python/messages.h"
#include "python/metadata.h"
#include "python/scope_setter.h"

namespace telegrad::python {

/// Methods of telegrad.worker.serving.handlers.Handlers, and functions of the environment (telegrad.worker.native).
struct ServerCallbacks {
  ServerCallbacks() = default;
  ServerCallbacks(nb::handle handlers, nb::handle environment)
      : wait_ready(handlers.attr("wait_ready")),
        prepare(handlers.attr("prepare")),
        park(handlers.attr("park")),
        accept(handlers.attr("accept")),
        set_result(handlers.attr("set_result")),
        value_of(handlers.attr("value_of")),
        reply(handlers.attr("reply_slow")),
        reply_when_done(handlers.attr("reply_when_done")),
        reply_error(handlers.attr("reply_error")),
        reply_canceled(handlers.attr("reply_canceled")),
        values(handlers.attr("values")),
        on_gradients(handlers.attr("on_gradients")),
        on_context_ended(handlers.attr("on_context_ended")),
        info_type(environment.attr("request_info")),
        clean_state(environment.attr("clean_state")),
        admit(handlers.attr("exposure").attr("admit")),
        resolver(handlers.attr("exposure").attr("resolver")),
        find_function(handlers.attr("exposure").attr("find_function")),
        method_of(handlers.attr("exposure").attr("method_of")),
        rerun_for_torch_error(environment.attr("rerun_for_torch_error")) {}

  int traverse(visitproc visit, void* arg) const {
    for (const nb::object* o : {&wait_ready,       &prepare,        &park,        &accept,
                                &set_result,       &value_of,       &reply,       &reply_when_done,
                                &reply_error,      &reply_canceled, &values,      &on_gradients,
                                &on_context_ended, &info_type,      &clean_state, &admit,
                                &resolver,         &find_function,  &method_of,   &rerun_for_torch_error}) {
      Py_VISIT(o->ptr());
    }
    return 0;
  }

  nb::object wait_ready;       // wait_ready(): blocks until all members of the group are known
  nb::object prepare;          // prepare(info, tag, flags, body, segments) -> SlowRequest; None: Python has replied
  nb::object park;             // park(request, slow, receiver, fetches, peer) -> is it parked?
  nb::object accept;           // accept(peer, local id, connection) -> the reference to create
  nb::object set_result;       // set_result(reference, value)
  nb::object value_of;         // value_of(receiver) -> the value, or raises
  nb::object reply;            // reply_slow(info, [result])
  nb::object reply_when_done;  // reply_when_done(info, slow, result, function)
  nb::object reply_error;      // reply_error(info, error)
  nb::object reply_canceled;   // reply_canceled(info, canceled): else its deadline has passed
  nb::object values;  // dict: (created on, local id) of a reference -> telegrad.worker.refs.owned_value.OwnedValue
  nb::object on_gradients;      // on_gradients(peer, connection, call, deadline, messages)
  nb::object on_context_ended;  // on_context_ended(peer, connection, (context id, requests))
  nb::object info_type;         // telegrad.worker.serving.request_info.RequestInfo
  nb::object clean_state;
  nb::object admit;          // admit(name): raises if the worker does not expose it; None: it exposes everything
  nb::object resolver;       // resolver(name) -> function() -> the function
  nb::object find_function;  // find_function(name) -> the function, or raises with a hint
  nb::object method_of;      // method_of(value, name)
  nb::object rerun_for_torch_error;  // rerun_for_torch_error(function, args, kwargs, error) -> (result, error)
};

/// Request at its callee. While it is parked, Python owns it.
struct Request {
  explicit Request(WorkItem&& i) : item(std::move(i)) {}

  int flags() const { return item.message.header.flags; }
  std::uint64_t call() const { return item.message.header.call_id; }
  Nanos deadline() const { return item.deadline == kNever ? 0 : item.deadline; }

  WorkItem item;
  nb::object slow;                  // a SlowRequest, if Python decodes the request
  nb::object context = nb::none();  // the autograd context that it runs in
  nb::object function, args, kwargs;
  nb::object receiver;  // (created on, local id)
  nb::object target;    // the reference to create
  bool decoded = false;
};

/// Calls a Python function and drops its result. Throws nb::python_error.
template <class... Args>
void call_back(const nb::object& function, const Args&... args) {
  nb::object result = nb::steal(call_python(function.ptr(), args.ptr()...));
  if (!result.is_valid()) throw nb::python_error();
}

/// Serves the requests of one worker. All functions need the GIL.
class RequestServer {
 public:
  RequestServer(Engine& engine, const codec::Codec& codec, const AutogradHooks& autograd, const ServerCallbacks& python,
                const ScopeSetter& scopes);

  /// Serves a new or resumed request until its reply is sent or it is parked.
  void serve(Request& arrived);
  /// Goes on with a request that was parked, unless it has been canceled or its deadline has passed.
  void resume(Request& parked);
  /// Replies with an exception. Throws nb::python_error.
  void reply_error(Request& r, const nb::object& error);
  /// Makes Python prepare every request, for the profile of a server or for interceptors.
  void record_all(bool on) { records_all_ = on; }

 private:
  /// Returns a reply with a value, or null if the codec cannot encode it. Sets `message` to its number once its tensors
  /// are recorded.
  std::unique_ptr<Outgoing> encode_value(const Request& r, const nb::object& value, nb::object& message) const;
  void reply_slow(Request& r, nb::object result, bool deferred);
  /// Returns the RequestInfo of a request.
  nb::object info_of(const Request& r) const;
  /// Reads the metadata and the body, in the scope of the request. Returns false if it is parked or Python has replied.
  bool decode(Request*& r, nb::object& holder);
  /// Checks that the worker exposes the function of a request. The name of a method is checked again with its value.
  void admit(const Request& r) const;
  /// Enters the scope of a request, and the caller's torch state.
  void enter(const Request& r) const;
  /// Reports whether the codec can decode a request, and reads its place in an autograd context.
  bool is_simple(const Request& r, ContextTag& in) const;
  /// Reads ([function,] args, kwargs[, local id to keep the result as][, receiver]).
  void read_body(Request& r, const nb::object& body);
  /// Finds the value of the receiver, and the method or function to run on it. Returns false if the request is parked
  /// until the value exists.
  bool find_receiver(Request*& r, nb::object& holder, nb::object& value);
  /// Parks a request until its references are ready, and moves it to `holder`, which Python keeps. Returns false if
  /// they are ready.
  bool park(Request*& r, nb::object& holder);
  /// Returns the value of a reference; not valid if it is not ready.
  nb::object value_here(const nb::object& receiver) const;
  /// Returns the function that a name refers to now, or the name of a method.
  nb::object function_of(const Name& name) const;
  nb::object run(Request& r);
  bool is_deferred(const nb::object& function, const nb::object& result) const;

  Engine& engine_;
  const codec::Codec& codec_;
  const AutogradHooks& autograd_;
  const ServerCallbacks& python_;
  const ScopeSetter& scopes_;
  const nb::object async_mark_, ready_name_, error_name_, value_name_;  // names of attributes
  bool records_all_ = false;
};

}  // namespace telegrad::python
