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
  Outcome run(PyObject* root, Encoded& out);

 private:
  enum class Packing : std::uint8_t { kPending, kRunning, kDone };
  struct Slot {
    nb::object object;
    Packing state = Packing::kPending;
  };

  bool is_basic() const { return mode_ == Mode::kBasic || mode_ == Mode::kBasicRecorded; }
  bool is_recorded() const { return mode_ == Mode::kRecorded || mode_ == Mode::kBasicRecorded; }
  Outcome value(PyObject* o, int depth);
  Outcome integer(PyObject* o);
  Outcome big_integer(PyObject* o);
  Outcome string(PyObject* o);
  Outcome bytes(PyObject* o);
  Outcome tuple(PyObject* o, int depth);
  Outcome list(PyObject* o, int depth);
  Outcome dict(PyObject* o, int depth);
  Outcome tensor(PyObject* o);
  Outcome other(PyObject* o, int depth);
  Outcome pack(std::size_t slot, int depth);
  Outcome tables();

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
