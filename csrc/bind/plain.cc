#include "bind/plain.h"

namespace telegrad::bind {

bool encodes(codec::Outcome outcome) {
  if (outcome == codec::Outcome::kError) throw nb::python_error();
  return outcome == codec::Outcome::kOk;
}

std::unique_ptr<Outgoing> encode_plain(const codec::Codec& codec, int tag, int flags, nb::handle value) {
  codec::Encoded encoded;
  if (!encodes(codec.encode_basic(value.ptr(), encoded))) return nullptr;
  return compose(tag, flags, encoded);
}

nb::object decode_plain(const codec::Codec& codec, Incoming& message, const nb::object& wrap) {
  nb::object value;
  if (message.segments.empty()) {
    value = nb::steal(codec.decode(message.body_view(), {}, wrap.ptr()));
  } else {
    auto memories = memories_of(message.segments);
    value = nb::steal(codec.decode(message.body_view(), memories, wrap.ptr()));
  }
  if (!value.is_valid()) throw nb::python_error();
  return value;
}

}  // namespace telegrad::bind
