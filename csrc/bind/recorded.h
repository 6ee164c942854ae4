// Plain calls made in an autograd context, on the short way: their preamble names the context, and says under which id
// the tensors that require grad are recorded. What recording is Python knows (telegrad.worker.recorder); here it is
// told.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "bind/plain.h"

namespace telegrad::bind {

/// A context in which a message was made, as its preamble says.
struct InContext {
  nb::object id;
  nb::object message;  // int, 0: no tensor of it is recorded
};

class Recorder {
 public:
  Recorder() = default;
  explicit Recorder(const nb::object& recorder);

  /// Writes a value made in a context; null if it is not plain, or the context has ended. `flags` gets the preamble's
  /// bit if there is one: a request has one in any case, a reply only if it has tensors to record. Throws
  /// nb::python_error.
  std::unique_ptr<Outgoing> encode(const codec::Codec& codec, const Words& words, int tag, int flags, nb::handle value,
                                   std::int32_t peer, nb::handle context, bool request) const;

  /// What the last segment, a preamble, says. False: it says more than that, or not that. Throws nb::python_error.
  static bool read(const codec::Codec& codec, const Incoming& message, InContext& out);

  /// Does the core run requests that are made in contexts?
  bool runs() const;
  /// A request has come: its context, or None.
  nb::object arrived(const InContext& in, std::int32_t peer) const;
  /// What records the tensors of a message that came, for `decode_plain`; not valid if there is nothing to do.
  nb::object wrap(const InContext& in, std::int32_t peer, nb::handle context) const;

  int traverse(visitproc visit, void* arg) const;
  void clear() { *this = {}; }

 private:
  nb::object recorder_, carry_, receive_, arrived_, partial_;
};

}  // namespace telegrad::bind
