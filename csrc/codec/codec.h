// The fast codec: plain values and tensors as compact bytes and memory out of band.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "codec/tensor.h"

namespace telegrad::codec {

/// A type of the layers above that travels as a plain value.
struct Extension {
  nb::type_object type;
  std::uint64_t code;  // on the wire
  nb::object pack;     // pack(object) -> plain value
  nb::object unpack;   // unpack(plain value) -> object
};

struct Encoded {
  nb::object body;  // bytes
  std::vector<Segment> segments;
  std::vector<nb::object> recorded;  // of `encode_recorded`
};

/// What may be in an encoded value, and what is told of it.
enum class Mode : std::uint8_t {
  kBasic,     // no extensions
  kFull,      // everything that the codec knows
  kRecorded,  // the same, and parameters as tensors; the tensors that require grad are told
  kBasicRecorded,
};

/// Not thread-safe by itself: the GIL guards it. Re-entrant, since packing may encode another message.
class Codec {
 public:
  Codec(TensorBridge tensors, int max_depth) : tensors_(std::move(tensors)), max_depth_(max_depth) {}

  void add_extension(Extension extension);  // throws nb::value_error
  Outcome encode(PyObject* object, Encoded& out) const;
  /// The same for a value without any extension in it; with one the answer is kNotPlain, and nothing was packed.
  Outcome encode_basic(PyObject* object, Encoded& out) const;
  /// As `encode`, and `out.recorded` gets the tensors that require grad, in the order in which `decode` makes them.
  /// Parameters that require grad are encoded as such tensors.
  Outcome encode_recorded(PyObject* object, Encoded& out, bool extensions = true) const;

  /// A new reference, or nullptr with a Python error set (CodecError when the bytes are at fault). Segments are moved
  /// from. With `wrap`, tensors that require grad are made as if they did not, all are given to wrap(list) at once
  /// (unless there are none), and what it returns, as many again, stands in their place.
  PyObject* decode(std::string_view body, std::span<SegmentMemory> segments, PyObject* wrap = nullptr) const;

  const TensorBridge& tensors() const { return tensors_; }
  int max_depth() const { return max_depth_; }
  const Extension* extension_of(const PyObject* object) const;
  const Extension* extension_of_code(std::uint64_t code) const;

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  TensorBridge tensors_;
  std::vector<Extension> extensions_;  // a handful: a scan beats a hash
  int max_depth_;
};

/// The ValueError that malformed bytes raise; a borrowed reference, made at first use.
PyObject* codec_error();

void init_codec(nb::module_& m);

}  // namespace telegrad::codec
