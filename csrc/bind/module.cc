// The extension module telegrad._core.
#include <nanobind/nanobind.h>

#include "bind/block.h"
#include "bind/callbacks.h"
#include "bind/client.h"
#include "bind/engine.h"
#include "bind/loans.h"
#include "bind/reach.h"
#include "bind/server.h"
#include "bind/step_gate.h"
#include "bind/wire.h"
#include "codec/codec.h"

NB_MODULE(_core, m) {
  m.doc() = "Telegrad's native core.";
  nanobind::set_leak_warnings(false);  // modules that live as long as the process hold some of it at exit
  telegrad::bind::init_block(m);
  telegrad::bind::init_loans(m);
  telegrad::bind::init_engine(m);
  telegrad::bind::init_client(m);
  telegrad::bind::init_server(m);
  telegrad::bind::init_reach(m);
  telegrad::bind::init_step_gate(m);
  telegrad::bind::init_callbacks(m);
  telegrad::codec::init_codec(m);
}
