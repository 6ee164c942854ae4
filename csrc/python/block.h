#pragma once

#include <nanobind/nanobind.h>

#include "memory/buffer_pool.h"

namespace telegrad::python {

/// `_core.Block`: received memory with the buffer interface.
struct PyBlock {
  BlockPtr block;
};

void init_block(nanobind::module_& m);

/// Returns a body for Python: bytes if it is small, else a Block without a copy.
nanobind::object body_object(BlockPtr body);
nanobind::list segment_list(std::vector<BlockPtr> segments);

}  // namespace telegrad::python
