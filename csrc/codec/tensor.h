// Tensors in the codec: their description, the location of their memory, and tensors over received memory.
//
// There are two interfaces to torch, and neither includes or links it. The fast one is the C function table of
// `torch.Tensor.__dlpack_c_exchange_api__`. The slow one is a pair of Python functions, for a torch without this table
// and for tensors that DLPack cannot describe.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "codec/dlpack.h"
#include "codec/dtypes.h"
#include "codec/format.h"
#include "codec/memory.h"
#include "codec/torch_method.h"

namespace telegrad::codec {

namespace nb = nanobind;

enum class EncodeStatus {
  kOk,
  kNotPlain,  // not encodable; no Python error is set
  kError,     // a Python error is set
};

/// Memory to send. `owner` keeps it in place: the tensor's storage, which survives `tensor.data = other`.
struct Segment {
  std::uintptr_t address = 0;
  std::size_t nbytes = 0;
  nb::object owner;
  nb::object tensor;           // that has the memory
  bool requires_grad = false;  // so the tensor may have a graph
};

/// Returns an owner of a segment's memory with a version counter: (storage, tensor). The tensor has no graph, so that
/// the owner keeps none alive. Throws nb::python_error.
nb::object versioned_owner(const Segment& segment);

struct TensorSpec {
  const DType* dtype = nullptr;
  bool requires_grad = false;
  bool graph_cut = false;  // see TensorFlags
  int ndim = 0;
  std::int64_t shape[kMaxTensorDims];
  std::int64_t strides[kMaxTensorDims];  // in elements, never negative

  /// Computes the number of elements, and the bytes from the first to past the last; false if either exceeds 63 bits.
  bool measure(std::int64_t& numel, std::int64_t& span) const;
  bool is_contiguous() const;
  /// Sets row-major strides as torch does; false if one exceeds 63 bits.
  bool set_contiguous();
};

/// A tensor's memory: its owner with the bounds, and the elements within.
struct Located {
  nb::object storage;
  std::uintptr_t begin = 0;
  std::size_t nbytes = 0;
  dlpack::Tensor view;
};

class TensorBridge {
 public:
  /// `exchange_api`: the capsule, or None. `byte_types`: the torch dtypes that DLPack describes as 8-bit integers (it
  /// does not distinguish torch.uint4 from torch.uint8). `parameter_type`: torch's Parameter class, or None.
  /// `forward_ad`: the dict of the module torch.autograd.forward_ad, or None. Throws nb::python_error.
  TensorBridge(nb::type_object tensor_type, nb::object exchange_api, nb::object encode, nb::object decode,
               nb::tuple byte_types, nb::object parameter_type, nb::object watch_cut, nb::object is_watched,
               nb::object forward_ad);

  bool is_tensor(PyObject* object) const { return Py_TYPE(object) == type_; }
  bool is_parameter(PyObject* object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == parameter_type_.ptr();
  }

  /// Fills `spec` and `segment` (without owner if the tensor has no elements). Reads no element.
  EncodeStatus describe(PyObject* tensor, TensorSpec& spec, Segment& segment) const;

  /// Makes a tensor over `memory`, into which `spec` must fit (no memory for a tensor without elements). Returns
  /// nullptr with a Python error set on failure.
  PyObject* rebuild(const TensorSpec& spec, SegmentMemory memory) const;

  /// Returns whether the tensor has a graph, at this worker or at its sender; -1 with a Python error set.
  int has_graph(PyObject* tensor) const;

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  EncodeStatus describe_natively(PyObject* tensor, TensorSpec& spec, Segment& segment, bool& unsure) const;
  EncodeStatus describe_by_hook(PyObject* tensor, TensorSpec& spec, Segment& segment) const;
  PyObject* rebuild_plain(const TensorSpec& spec, SegmentMemory memory) const;
  PyObject* rebuild_natively(const TensorSpec& spec, SegmentMemory& memory) const;
  PyObject* rebuild_by_hook(const TensorSpec& spec, SegmentMemory memory) const;
  /// Finds the memory of a tensor: what it fills in is valid until Python code runs. False if the hook must do it,
  /// perhaps with a Python error set.
  bool locate(PyObject* tensor, Located& out) const;
  bool flag(const TorchMethod& method, PyObject* tensor, bool& out) const;
  /// Returns whether tensors may have tangents, which only the hook sees.
  bool in_dual_level() const;

  nb::type_object type_object_;
  PyTypeObject* type_;
  const dlpack::ExchangeApi* api_ = nullptr;
  nb::object encode_, decode_;
  nb::tuple byte_types_;
  nb::object parameter_type_;
  TorchMethod is_neg_, is_conj_, untyped_storage_, data_ptr_;
  nb::object storage_type_;
  nb::object watch_cut_, is_watched_;
  nb::object forward_ad_, no_level_;
  nb::str requires_grad_, is_leaf_, leaf_hooks_, dtype_, current_level_;
};

}  // namespace telegrad::codec
