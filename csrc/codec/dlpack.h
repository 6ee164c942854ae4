// The part of DLPack that the codec uses, after its public specification (https://dmlc.github.io/dlpack): the tensor
// structs of version 1, and the table of C functions that a tensor type offers as `__dlpack_c_exchange_api__` (since
// 1.2). Binary layout only; nothing of torch is included or linked.
#pragma once

#include <cstdint>

namespace telegrad::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr const char* kExchangeApiCapsule = "dlpack_exchange_api";
inline constexpr std::int32_t kCpu = 1;

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

/// Tensor with memory that belongs to `context`; its owner calls `deleter` once, on any thread.
struct ManagedTensor {
  Version version;
  void* context;
  void (*deleter)(ManagedTensor* self);
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {
  Version version;
  ExchangeApi* older;
  int (*allocate)(Tensor* prototype, ManagedTensor** out, void* context,
                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*managed_from_object)(void* object, ManagedTensor** out);
  int (*managed_to_object)(ManagedTensor* tensor, void** out);  // takes ownership; 0, or -1 with a Python error
  int (*view_of_object)(void* object, Tensor* out);  // valid until Python runs again; 0, or -1 with a Python error
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

static_assert(sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 80 && sizeof(ExchangeApi) == 56);

}  // namespace telegrad::dlpack
