// The extension module telegrad._core.
#include <nanobind/nanobind.h>

#include "bind/block.h"
#include "bind/engine.h"

namespace telegrad {
void init_codec(nanobind::module_& m);
}

NB_MODULE(_core, m) {
  m.doc() = "Telegrad's native core.";
  nanobind::set_leak_warnings(false);  // modules that live as long as the process hold some of it at exit
  telegrad::bind::init_block(m);
  telegrad::bind::init_engine(m);
  telegrad::init_codec(m);
}
