// A call straight from what the program has written, without a look from Python: to whom, and under which name. Nearly
// all calls that no request makes are of this kind.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace telegrad::bind {

namespace nb = nanobind;

/// What it takes to tell. All of it is Python's, and looked at anew for each call.
struct Surroundings {
  nb::object current;          // the ContextVar of what runs here, see telegrad.worker.scope
  nb::object infos;            // dict: worker by name and by id
  nb::object info_type;        // WorkerInfo
  nb::object known;            // dict: function -> _Known, see telegrad.serialize.names
  nb::object by_value;         // set: modules that travel by value
  nb::object profiling;        // dict: of the module that has `unusual`
  nb::object is_grad_enabled;  // torch's
  nb::object running_loop;     // asyncio's
  nb::object future_type, no_devices;
};

/// Whom and what a call is for.
struct Addressed {
  std::int32_t peer = -1;
  std::uint32_t number = 0;
  nb::object text;  // bytes: the function's name
};

class Direct {
 public:
  explicit Direct(Surroundings around);

  /// False: Python must look, or say what is wrong. Throws nb::python_error.
  bool address(nb::handle to, nb::handle function, Addressed& out) const;
  /// The same where it is known to whom.
  bool knows(nb::handle function, Addressed& out) const { return is_usual() && find_name(function, out); }

  /// A new future of a call by `calls`, as telegrad.worker.calls makes it. Throws nb::python_error.
  nb::object future(nb::handle calls, nb::handle function, std::int32_t peer, nb::handle timeout) const;
  /// Its call's id is known.
  void set_call(nb::handle future, std::uint64_t id) const;

  /// Does an event loop run in this thread? Throws nb::python_error.
  bool in_event_loop() const;

  int traverse(visitproc visit, void* arg) const;

 private:
  bool is_usual() const;
  bool find_peer(nb::handle to, std::int32_t& peer) const;
  bool find_name(nb::handle function, Addressed& out) const;

  Surroundings around_;
  const nb::object id_, unusual_, calls_, request_, call_;  // names of attributes
};

}  // namespace telegrad::bind
