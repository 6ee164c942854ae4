#include "bind/plain.h"

namespace telegrad::bind {

std::unique_ptr<Outgoing> encode_plain(const codec::Codec& codec, const Words& words, int tag, int flags,
                                       nb::handle value) {
  codec::Encoded encoded;
  switch (codec.encode_basic(value.ptr(), encoded)) {
    case codec::Outcome::kError:
      throw nb::python_error();
    case codec::Outcome::kNotPlain:
      return nullptr;
    case codec::Outcome::kOk:
      break;
  }
  // Python says what is wrong with a message over the limits.
  if (static_cast<std::uint64_t>(PyBytes_GET_SIZE(encoded.body.ptr())) > words.max_body) return nullptr;
  if (encoded.segments.size() >= Limits{}.segments) return nullptr;
  return compose(tag, flags, encoded);
}

nb::object decode_plain(const codec::Codec& codec, Incoming& message) {
  nb::object value;
  if (message.segments.empty()) {
    value = nb::steal(codec.decode(message.body_view(), {}));
  } else {
    auto memories = memories_of(message.segments);
    value = nb::steal(codec.decode(message.body_view(), memories));
  }
  if (!value.is_valid()) throw nb::python_error();
  return value;
}

}  // namespace telegrad::bind
