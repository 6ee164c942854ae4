// Preparation of a call: from what the program wrote to a message for a peer. It reads the scope of the calling thread,
// finds the peer and the function's name, and encodes. Python encodes what the codec cannot (`encode_slow`).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "codec/codec.h"
#include "core/engine.h"
#include "python/messages.h"
#include "python/metadata.h"

namespace telegrad::python {

/// Function of the API that made the call; profiles show it.
enum class CallMode : std::uint8_t { kSync, kAsync, kRemote };

struct CallForm {
  CallMode mode{};
  nb::handle to;        // a name, an id or a WorkerInfo; with a receiver or `internal`, an id
  nb::handle function;  // with a receiver: None for the value itself, the name of a method, or a function of the value
  nb::handle args, kwargs;
  Nanos timeout = 0;
  nb::handle receiver = Py_None;  // an RRef
  bool introduce = false;         // the owner may not know the receiver
  nb::handle keep_as = Py_None;   // int: the local id under which the owner keeps the result
  bool internal = false;          // a call that Telegrad itself makes
};

struct PreparedCall {
  std::int32_t peer = -1;
  std::unique_ptr<Outgoing> message;  // null if an interceptor has to send `request`
  nb::object request;                 // Request if Python encoded it, else InterceptedRequest
  nb::object keep_alive;              // kept alive until the reply, or not valid
  nb::object context = nb::none();    // the caller's autograd context
  nb::object chain;                   // the caller's call chain (int), inside a scope
  nb::object label;                   // the function, or its name in error texts
  Nanos timeout = 0;
  std::uint32_t depth = 0;  // of nested calls; 0: outside of handlers and of callbacks of the pool
  bool in_scope = false;    // inside any scope
};

/// Creates the message of a request that Python has encoded.
std::unique_ptr<Outgoing> compose_request(nb::handle request);

class Preparer {
 public:
  /// `calls`: telegrad.worker.calls.client.Calls. `environment`: telegrad.worker.native.Environment.
  Preparer(const Engine& engine, const codec::Codec& codec, const AutogradHooks& autograd, nb::handle calls,
           nb::handle environment);

  /// Reads the scope and encodes a call. Throws nb::python_error.
  PreparedCall prepare(const CallForm& form) const;

  /// Reads the context, the chain and the depth of a call from the scope of this thread, which limits its timeout.
  /// Throws nb::python_error.
  void read_scope(PreparedCall& call, Nanos timeout) const;

  /// Creates the future of a call. Throws nb::python_error.
  nb::object future(const PreparedCall& call) const;
  /// Records the id of a sent call in its completion target. Throws nb::python_error.
  void set_call(nb::handle target, std::uint64_t id) const;

  /// Reports whether an event loop runs in this thread. Throws nb::python_error.
  bool in_event_loop() const;

  const nb::object& future_type() const { return future_type_; }

  int traverse(visitproc visit, void* arg) const;

 private:
  struct Name {
    nb::object both;  // (number, text), if Python found it
    nb::object text;  // not valid: the function travels by value
    std::uint32_t number = 0;
  };

  static nb::object pair_of(const Name& name);
  nb::object form_of(const CallForm& form, const PreparedCall& call, const Name& name, nb::handle args,
                     nb::handle kwargs) const;
  std::int32_t find_peer(nb::handle to) const;
  Name find_name(nb::handle function) const;
  std::unique_ptr<Outgoing> encode(const CallForm& form, const PreparedCall& call, const Name& name, nb::handle args,
                                   nb::handle kwargs) const;
  bool is_fast(const CallForm& form, const PreparedCall& call, int& flags) const;

  const Engine& engine_;
  const codec::Codec& codec_;
  const AutogradHooks& autograd_;
  const std::int32_t me_;
  nb::object calls_;
  nb::object encode_slow_, find_peer_, find_name_;  // methods of `calls_`
  nb::object peers_;                                // dict: WorkerInfo by name and by id
  nb::object functions_;                            // dict: function -> _Known, see wire::KnownNameField
  nb::object methods_;                              // dict: method name -> (number, text)
  nb::object current_;                              // the ContextVar of the scope, see telegrad.worker.scope
  nb::object info_type_, form_type_, request_type_, future_type_, future_devices_;
  nb::object by_value_;      // set: modules that travel by value
  nb::object interceptors_;  // dict: those of this process, see telegrad.worker.calls.interceptors
  nb::object is_grad_enabled_, is_autocast_enabled_, running_loop_;
  nb::object caller_flags_, checked_arguments_, check_blocking_;
  const nb::object id_, calls_name_, request_name_, call_name_;  // names of attributes
  nb::object modes_[3];
};

}  // namespace telegrad::python
