#include "python/snapshot.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "codec/gil.h"
#include "core/engine.h"

namespace telegrad::python {

namespace nb = nanobind;

namespace {

/// Returns the name of a request as bytes: it need not be text.
nb::bytes name_of(const RequestSnapshot& r) { return nb::bytes(r.name.data(), r.name.size()); }

/// Returns the deadline of a request; 0 for none.
Nanos deadline_of(const RequestSnapshot& r) { return r.deadline == kNever ? 0 : r.deadline; }

const char* state_of(const RequestSnapshot& r) {
  using Text = wire::RequestStateText;
  static constexpr const char* kNames[] = {Text::kQueued, Text::kRunning, Text::kParked, Text::kDeferred};
  return kNames[static_cast<std::size_t>(r.state)];
}

}  // namespace

void init_snapshot(nb::module_& m) {
  nb::class_<CallSnapshot>(m, "CallSnapshot", "A call of this worker without a reply.")
      .def_ro("id", &CallSnapshot::id)
      .def_ro("peer", &CallSnapshot::peer)
      .def_ro("name_id", &CallSnapshot::name_id, "Number of the function's name; 0 for none.")
      .def_ro("connection", &CallSnapshot::connection, "The connection that has the request; 0 while it waits.")
      .def_ro("since", &CallSnapshot::since, "Monotonic time of the call in ns.");
  nb::class_<RequestSnapshot>(m, "RequestSnapshot", "A request of a peer without a reply.")
      .def_ro("connection", &RequestSnapshot::connection)
      .def_ro("call", &RequestSnapshot::call)
      .def_ro("peer", &RequestSnapshot::peer)
      .def_prop_ro("state", state_of, "queued, running, parked or deferred.")
      .def_ro("since", &RequestSnapshot::since, "When it was queued, or when a thread took it, in monotonic ns.")
      .def_prop_ro("deadline", deadline_of, "Of a queued request, in monotonic ns; 0 for none.")
      .def_prop_ro("name", name_of, "The function's name as sent, if the request is queued or parked.");
  nb::class_<PeerSnapshot>(m, "PeerSnapshot", "A peer and the session with it.")
      .def_ro("id", &PeerSnapshot::id)
      .def_ro("name", &PeerSnapshot::name)
      .def_ro("incarnation", &PeerSnapshot::incarnation, "The newest that is known.")
      .def_ro("connection", &PeerSnapshot::connection, "The connection that carries the session; 0 if none is open.")
      .def_ro("epoch", &PeerSnapshot::epoch, "Epoch of the messages that are made now.")
      .def_ro("connecting", &PeerSnapshot::connecting)
      .def_ro("pending", &PeerSnapshot::pending, "Number of messages that wait for a connection.")
      .def_ro("last_error", &PeerSnapshot::last_error, "Of the last attempt to connect, or why the peer was removed.");
  nb::class_<ConnectionSnapshot>(m, "ConnectionSnapshot", "A connection, open or in its handshake.")
      .def_ro("id", &ConnectionSnapshot::id)
      .def_ro("peer", &ConnectionSnapshot::peer, "Id of the peer; -1 if not known yet.")
      .def_ro("open", &ConnectionSnapshot::open)
      .def_ro("initiator", &ConnectionSnapshot::initiator, "This worker has connected.")
      .def_ro("stalled", &ConnectionSnapshot::stalled, "The peer has not read for a while.")
      .def_ro("address", &ConnectionSnapshot::address)
      .def_ro("source", &ConnectionSnapshot::source, "Source of an accepted connection.")
      .def_ro("lanes", &ConnectionSnapshot::lanes)
      .def_ro("unprocessed", &ConnectionSnapshot::unprocessed,
              "Bytes of requests that the peer has not started to process.");
  nb::class_<LimitSnapshot>(m, "LimitSnapshot", "A limit of what the worker keeps at the same time.")
      .def_ro("option", &LimitSnapshot::option, "Name of the option that sets it.")
      .def_ro("used", &LimitSnapshot::used, "Of the peer that uses most, if the limit is per peer.")
      .def_ro("limit", &LimitSnapshot::limit)
      .def_ro("refused", &LimitSnapshot::refused, "How often a message, or more memory, was refused.");
  nb::class_<Snapshot>(m, "Snapshot", "Calls, requests, sessions and connections of an engine at one moment.")
      .def_ro("at", &Snapshot::at, "Monotonic time in ns.")
      .def_ro("calls", &Snapshot::calls)
      .def_ro("requests", &Snapshot::requests)
      .def_ro("peers", &Snapshot::peers)
      .def_ro("connections", &Snapshot::connections)
      .def_ro("limits", &Snapshot::limits);
}

}  // namespace telegrad::python
