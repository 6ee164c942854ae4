// The metadata of messages of an autograd context. It names the context and the id under which both ends record the
// message's tensors that require grad. Python records them (telegrad.worker.autograd_hooks).
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "codec/codec.h"
#include "python/messages.h"

namespace telegrad::python {

/// Reports whether the codec encoded a value. Throws nb::python_error.
bool is_encoded(codec::EncodeStatus status);

/// Encodes a value without metadata; null if the codec cannot. Throws nb::python_error.
std::unique_ptr<Outgoing> encode_basic(const codec::Codec& codec, int tag, int flags, nb::handle value);

/// Returns the id of an autograd context, or None for None. Throws nb::python_error.
nb::object id_of(nb::handle context);

/// Appends metadata to a message: its last segment. Throws nb::python_error.
void add_metadata(Outgoing& m, const codec::Codec& codec, nb::handle target, nb::handle context, nb::handle message);

/// Autograd context and number of a message, from its metadata.
struct ContextTag {
  nb::object id;
  nb::object message;  // int; 0: none of its tensors is recorded
};

/// Calls `telegrad.worker.autograd_hooks.AutogradHooks`, which records messages.
class AutogradHooks {
 public:
  explicit AutogradHooks(const nb::object& hooks);

  /// Encodes the body of a message of a context and records its tensors. False if the codec cannot encode it, or a
  /// request's context has ended. `message` is the number for the metadata, or None: a reply without tensors to record,
  /// or whose context has ended, needs no metadata. Throws nb::python_error.
  /// `epoch` is that of a request.
  bool encode(const codec::Codec& codec, nb::handle value, std::int32_t peer, nb::handle context, bool request,
              std::int64_t epoch, codec::Encoded& encoded, nb::object& message) const;

  /// Undoes the recording of a reply that was not sent. Throws nb::python_error.
  void rollback(nb::handle context, nb::handle message, std::int32_t peer) const;

  /// Reads the metadata, which is the last segment. `out` stays empty if it names only the reference to create, which
  /// the body also names. Returns false if it has any other field, or names a call chain. Ignores headers: they are for
  /// interceptors, for which Python reads the metadata. Throws nb::python_error.
  static bool read(const codec::Codec& codec, const Incoming& message, ContextTag& out);

  /// Reports whether requests of a context run without a guard around them. Throws nb::python_error.
  bool is_unguarded() const;
  /// Returns the context of a received request, or None.
  nb::object on_request(const ContextTag& in, std::int32_t peer, std::uint64_t connection) const;
  /// Returns the function that records the tensors of a received message, for `decode_body`; not valid if there are
  /// none.
  nb::object wrap(const ContextTag& in, std::int32_t peer, nb::handle context) const;

  /// The plain context of this worker, in which calls outside of contexts may be recorded.
  const nb::object& plain() const { return plain_; }
  /// The context of code outside of any: the plain one, or None.
  const nb::object& outside() const { return outside_; }

  int traverse(visitproc visit, void* arg) const;
  void clear() { hooks_ = on_send_ = rollback_ = on_request_ = wrap_ = plain_ = outside_ = {}; }

 private:
  nb::object hooks_, on_send_, rollback_, on_request_, wrap_, plain_, outside_;
};

}  // namespace telegrad::python
