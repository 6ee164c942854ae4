// Encoder of one message. See format.h for the bytes and for why extensions are packed last.
#pragma once

#include <vector>

#include "codec/codec.h"
#include "codec/pointer_index.h"
#include "codec/writer.h"

namespace telegrad::codec {

class Encoder {
 public:
  Encoder(const Codec& codec, Mode mode) : codec_(codec), mode_(mode) {}
  EncodeStatus run(PyObject* root, Encoded& out);

 private:
  enum class Packing : std::uint8_t { kPending, kRunning, kDone };
  struct Slot {
    nb::object object;
    Packing state = Packing::kPending;
  };

  bool is_basic() const { return mode_ == Mode::kBasic || mode_ == Mode::kBasicRecorded; }
  bool is_recorded() const { return mode_ == Mode::kRecorded || mode_ == Mode::kBasicRecorded; }
  EncodeStatus value(PyObject* o, int depth);
  EncodeStatus integer(PyObject* o);
  EncodeStatus big_integer(PyObject* o);
  EncodeStatus string(PyObject* o);
  EncodeStatus bytes(PyObject* o);
  EncodeStatus tuple(PyObject* o, int depth);
  EncodeStatus list(PyObject* o, int depth);
  EncodeStatus dict(PyObject* o, int depth);
  EncodeStatus tensor(PyObject* o);
  EncodeStatus other(PyObject* o, int depth);
  EncodeStatus pack(std::size_t slot, int depth);
  EncodeStatus tables();

  bool is_first_visit(PyObject* o);
  bool tensors_overlap() const;

  const Codec& codec_;
  const Mode mode_;
  Writer main_;
  Writer tensor_table_;
  Writer extension_table_;
  Writer* out_ = &main_;
  bool packing_ = false;  // kNotPlain is not possible any more
  PointerIndex containers_, tensors_, extensions_;
  std::vector<Slot> slots_;
  std::vector<Segment> segments_;
  std::vector<nb::object> recorded_;
  std::vector<nb::object> alive_;  // objects that an index knows by address must not be freed before the end
};

}  // namespace telegrad::codec
