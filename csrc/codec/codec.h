// The codec: plain values and tensors as compact bytes and memory out of band.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "codec/tensor.h"

namespace telegrad::codec {

/// A registered type, which is encoded as a plain value.
struct Extension {
  nb::type_object type;
  std::uint64_t code;  // on the wire
  nb::object pack;     // pack(object) -> plain value
  nb::object unpack;   // unpack(plain value) -> object
};

/// The segments of a message of this size get owners with a version (`versioned_owner`). Half of what a link copies
/// (core/resumable.h), because metadata may be added.
inline constexpr std::uint64_t kMinVersioned = 32 << 10;

struct Encoded {
  /// Returns whether the message is large enough for owners with a version.
  bool needs_versions() const;

  nb::object body;  // bytes
  std::vector<Segment> segments;
  std::vector<nb::object> recorded;  // from `encode_recorded`
  bool versioned = false;            // the owners of its segments get versions, because it may be sent again
};

/// Values that an encoder accepts.
enum class Mode : std::uint8_t {
  kBasic,     // no extensions
  kFull,      // everything that the codec can encode
  kRecorded,  // also parameters as tensors; reports the tensors that require grad
  kBasicRecorded,
};

/// Not thread-safe on its own: the GIL guards it. Reentrant, because packing may encode another message.
class Codec {
 public:
  /// `max_objects`: of a decoded value, in units of 64 bytes. `too_many`: class of the exception for more, which is
  /// made from the name of the option and a text.
  Codec(TensorBridge tensors, int max_depth, std::uint64_t max_objects, nb::object too_many)
      : tensors_(std::move(tensors)),
        too_many_(std::move(too_many)),
        max_depth_(max_depth),
        max_objects_(max_objects) {}

  void add_extension(Extension extension);  // throws nb::value_error
  EncodeStatus encode(PyObject* object, Encoded& out) const;
  /// Encodes a value without extensions. Returns kNotPlain for a value with one, without packing anything.
  EncodeStatus encode_basic(PyObject* object, Encoded& out) const;
  /// Encodes like `encode`, and sets `out.recorded` to the tensors that require grad, in the order of `decode`.
  /// Parameters that require grad are encoded as such tensors.
  EncodeStatus encode_recorded(PyObject* object, Encoded& out, bool extensions = true) const;

  /// Returns a new reference, or nullptr with a Python error set (CodecError for malformed bytes). Moves from the
  /// segments. With `wrap`, tensors that require grad are created without it and passed to wrap(list) in one list,
  /// unless there are none; the tensors that it returns, the same number, are used instead.
  PyObject* decode(std::string_view body, std::span<SegmentMemory> segments, PyObject* wrap = nullptr) const;

  const TensorBridge& tensors() const { return tensors_; }
  int max_depth() const { return max_depth_; }
  std::uint64_t max_objects() const { return max_objects_; }
  const nb::object& too_many() const { return too_many_; }
  /// Records how many objects a decoded value had, for `most_objects`.
  void count_objects(std::uint64_t objects) const {
    if (objects > most_objects_) most_objects_ = objects;
  }
  std::uint64_t most_objects() const { return most_objects_; }
  void count_refused() const { ++refused_; }
  std::uint64_t refused() const { return refused_; }
  const Extension* extension_of(const PyObject* object) const;
  const Extension* extension_of_code(std::uint64_t code) const;

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  TensorBridge tensors_;
  nb::object too_many_;
  std::vector<Extension> extensions_;  // few: a scan is faster than a hash
  int max_depth_;
  std::uint64_t max_objects_;
  mutable std::uint64_t most_objects_ = 0, refused_ = 0;
};

/// Returns the ValueError subclass for malformed bytes; a borrowed reference, created on first use.
PyObject* codec_error();

void init_codec(nb::module_& m);

}  // namespace telegrad::codec
