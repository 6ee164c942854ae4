// The extension module telegrad._core.
#include <nanobind/nanobind.h>

#include "codec/codec.h"
#include "python/block.h"
#include "python/buffer_leases.h"
#include "python/callbacks.h"
#include "python/client.h"
#include "python/engine.h"
#include "python/faults.h"
#include "python/graph_walk.h"
#include "python/server.h"
#include "python/snapshot.h"
#include "python/step_gate.h"
#include "python/thread_frames.h"

NB_MODULE(_core, m) {
  m.doc() = "Telegrad's native core.";
  nanobind::set_leak_warnings(false);  // modules that live as long as the process hold some of it at exit
  telegrad::python::init_block(m);
  telegrad::python::init_buffer_leases(m);
  telegrad::python::init_snapshot(m);
  telegrad::python::init_faults(m);
  telegrad::python::init_engine(m);
  telegrad::python::init_client(m);
  telegrad::python::init_server(m);
  telegrad::python::init_graph_walk(m);
  telegrad::python::init_step_gate(m);
  telegrad::python::init_callbacks(m);
  telegrad::python::init_thread_frames(m);
  telegrad::codec::init_codec(m);
}
