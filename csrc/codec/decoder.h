// Decoder of one message. It trusts no input: a count is checked against the remaining bytes before memory is reserved,
// a tensor against its segment, and nesting against the codec's depth.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "codec/codec.h"
#include "codec/reader.h"

namespace telegrad::codec {

class Decoder {
 public:
  Decoder(const Codec& codec, std::string_view body, std::span<SegmentMemory> segments, PyObject* wrap)
      : codec_(codec), body_(body), segments_(segments), wrap_(wrap) {}

  PyObject* run();  // a new reference; nullptr with a Python error set, as for all methods below

 private:
  /// Counts objects before they are made. Returns false, with an error, if they are too many.
  bool count_objects(std::uint64_t count) {
    objects_ += count;
    return objects_ <= codec_.max_objects() || refuse_objects();
  }
  bool refuse_objects();
  bool tables(Reader in);
  bool tensor(Reader& in);
  bool wrap();
  bool extension(Reader& in);
  PyObject* value(Reader& in, int depth);
  PyObject* sequence(Reader& in, std::uint64_t count, int depth, bool is_tuple);
  PyObject* dict(Reader& in, std::uint64_t count, int depth);
  PyObject* string(Reader& in, std::uint64_t length);
  PyObject* big_integer(Reader& in);
  PyObject* reference(const std::vector<nb::object>& table, std::uint64_t number);

  const Codec& codec_;
  std::uint64_t objects_ = 1;  // of the value, in units of 64 bytes
  std::string_view body_;
  std::span<SegmentMemory> segments_;
  PyObject* wrap_;  // borrowed; may be null
  std::size_t segments_used_ = 0;
  std::vector<std::size_t> to_wrap_;  // indices of tensors
  std::vector<nb::object> tensors_, extensions_;
};

}  // namespace telegrad::codec
