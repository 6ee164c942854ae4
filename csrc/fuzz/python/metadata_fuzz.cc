// The trailer of a request: the metadata of its call, as the native server reads it.
//
// Input: the bytes of the trailer. Whatever they are, the server reads a context, or leaves the request to Python.
#include "fuzz/input.h"
#include "fuzz/python/interpreter.h"
#include "memory/buffer_pool.h"
#include "python/metadata.h"

namespace telegrad::fuzz {
namespace {

namespace nb = nanobind;

void run(Input in) {
  codec();
  const std::string_view bytes = in.rest();
  const auto pool = BufferPool::make(0);
  Incoming message;
  message.header = {.type = FrameType::kRequest, .flags = kTrailer};
  message.segments.push_back(pool->allocate(bytes.size()));
  std::memcpy(message.segments[0]->data(), bytes.data(), bytes.size());
  python::ContextTag tag;
  bool simple = false;
  try {
    simple = python::AutogradHooks::read(codec(), message, tag);
  } catch (nb::python_error&) {  // Python raises the error
    return;
  }
  if (!tag.id.is_valid()) return;
  require(simple && PyLong_Check(tag.id.ptr()) && PyLong_Check(tag.message.ptr()),
          "a context has numbers as its names");
}

}  // namespace
}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::run({data, size});
  return 0;
}
