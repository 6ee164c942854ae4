#include "python/block.h"

#include <vector>

#include "python/buffer_leases.h"

namespace nb = nanobind;

namespace telegrad::python {
namespace {

constexpr std::size_t kBytesBody = 64 << 10;  // a larger body is handed over without a copy

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  Block& block = *nb::inst_ptr<PyBlock>(self)->block;
  return PyBuffer_FillInfo(view, self, block.data(), static_cast<Py_ssize_t>(block.size()), 0, flags);
}

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

}  // namespace

void init_block(nb::module_& m) {
  nb::class_<PyBlock>(m, "Block", nb::type_slots(slots),
                      "Received memory, 64-byte aligned and writable.\n\n"
                      "Its last user returns it to the buffer pool, or to the peer that leased it.")
      .def("__len__", [](const PyBlock& b) { return b.block->size(); });
}

nb::object body_object(BlockPtr body) {
  if (!body) return nb::bytes("", 0);
  if (body->size() <= kBytesBody) return nb::bytes(reinterpret_cast<const char*>(body->data()), body->size());
  return nb::cast(PyBlock{std::move(body)});
}

nb::list segment_list(std::vector<BlockPtr> segments) {
  nb::list out;
  for (auto& s : segments) out.append(object_of(std::move(s)));
  return out;
}

}  // namespace telegrad::python
