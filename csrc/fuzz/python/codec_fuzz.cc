// Bodies and segments of any content into the decoder of values.
//
// Input: flags, number of segments, their sizes, then the body. A decoded value that the codec encodes must decode
// again, to a value that is encoded as the same bytes.
#include <optional>

#include "fuzz/input.h"
#include "fuzz/python/interpreter.h"

namespace telegrad::fuzz {
namespace {

namespace nb = nanobind;

enum Flags : std::uint8_t { kWrap = 1 };

/// Decodes; the result is not valid if the bytes are malformed.
nb::object decode(std::string_view body, std::vector<codec::SegmentMemory>& segments, bool wraps) {
  static PyObject* const wrap = nb::module_::import_("builtins").attr("tuple").inc_ref().ptr();
  nb::object value = nb::steal(codec().decode(body, segments, wraps ? wrap : nullptr));
  if (!value.is_valid()) {
    require(PyErr_ExceptionMatches(codec::codec_error()), "malformed bytes raise CodecError");
    PyErr_Clear();
  }
  return value;
}

std::optional<codec::Encoded> encode(const nb::object& value) {
  codec::Encoded encoded;
  const codec::EncodeStatus status = codec().encode(value.ptr(), encoded);
  require(status != codec::EncodeStatus::kError, "a decoded value is encodable, or is not plain");
  if (status != codec::EncodeStatus::kOk) return std::nullopt;
  return encoded;
}

std::string_view bytes_of(const codec::Encoded& encoded) {
  return {PyBytes_AS_STRING(encoded.body.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(encoded.body.ptr()))};
}

void run(Input in) {
  codec();
  const std::uint8_t flags = in.byte();
  std::vector<codec::SegmentMemory> segments;
  for (int left = in.byte() & 7; left > 0; --left) segments.push_back(segment_of(in.number<std::uint16_t>()));
  const nb::object value = decode(in.rest(), segments, flags & kWrap);
  if (!value.is_valid()) return;
  const auto first = encode(value);
  if (!first) return;
  std::vector<codec::SegmentMemory> copies;
  for (const codec::Segment& s : first->segments) {
    copies.push_back(segment_of(s.nbytes));
    std::memcpy(copies.back().data(), reinterpret_cast<const void*>(s.address), s.nbytes);
  }
  const nb::object again = decode(bytes_of(*first), copies, false);
  require(again.is_valid(), "encoded bytes are decoded");
  const auto second = encode(again);
  require(second && bytes_of(*second) == bytes_of(*first), "a decoded value is encoded as the same bytes");
}

}  // namespace
}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::run({data, size});
  return 0;
}
