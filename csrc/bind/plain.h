// The short way of calls that carry nothing but plain values and tensors, as most do: values are coded and decoded
// right here, so that a call takes one native call on either side. Whatever is out of the ordinary goes back to Python,
// to telegrad.worker.calls and telegrad.worker.handlers, which know everything.
#pragma once

#include <nanobind/nanobind.h>

#include "bind/messages.h"
#include "codec/codec.h"
#include "core/engine.h"

namespace telegrad::bind {

/// What the short way must know of messages; telegrad.wire has the meaning.
struct Words {
  int call = 0;           // the tag of requests to run a function
  int value = 0;          // the tag of replies with its result
  int make = 0;           // the tag of requests to run one and keep the result
  int created = 0;        // the tag of replies to these
  int may_linger = 0;     // the flag of both
  int request_flags = 0;  // a request with any of these is not plain
  int reply_flags = 0;    // nor is a reply with any of these
  int gradients = 0;      // the tag of messages of backward passes, and of replies to them
  int ended = 0;          // the tag of the word that an autograd context has ended
  int preamble = 0;       // but for this one: a message with it may be plain and made in an autograd context
};

/// Is there something to send? Throws nb::python_error.
bool encodes(codec::Outcome outcome);

/// Writes a value; null if it is not plain. Throws nb::python_error.
std::unique_ptr<Outgoing> encode_plain(const codec::Codec& codec, int tag, int flags, nb::handle value);

/// Reads one. `wrap`: see `Codec::decode`, or not valid. Throws nb::python_error.
nb::object decode_plain(const codec::Codec& codec, Incoming& message, const nb::object& wrap = {});

inline bool is_plain_value(const Words& words, const Outcome& o) {
  return o.status == CallStatus::kReplied && o.reply.header.tag == words.value &&
         !(o.reply.header.flags & words.reply_flags);
}

/// The same, but with a preamble.
inline bool is_recorded_value(const Words& words, const Outcome& o) {
  return o.status == CallStatus::kReplied && o.reply.header.tag == words.value &&
         (o.reply.header.flags & words.reply_flags) == words.preamble;
}

void init_plain_calls(nb::module_& m);
void init_plain_pool(nb::module_& m);

}  // namespace telegrad::bind
