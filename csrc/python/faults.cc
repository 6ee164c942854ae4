#include "core/faults.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "codec/gil.h"
#include "python/faults.h"

using namespace nanobind::literals;

namespace telegrad::python {

namespace nb = nanobind;

namespace {

void add(Faults& faults, std::uint64_t id, int action, std::string destination, std::uint32_t types, int tag,
         int without, std::uint64_t nth, std::uint64_t count, double probability, Nanos delay, bool body) {
  faults.add({.id = id,
              .action = static_cast<FaultAction>(action),
              .destination = std::move(destination),
              .types = types,
              .tag = tag,
              .without = static_cast<std::uint16_t>(without),
              .nth = nth,
              .count = count,
              .probability = probability,
              .delay = delay,
              .body = body});
}

}  // namespace

void init_faults(nb::module_& m) {
  nb::class_<AppliedFault>(m, "AppliedFault", "A rule applied to a message.")
      .def_ro("rule", &AppliedFault::rule, "The id of the rule.")
      .def_ro("destination", &AppliedFault::destination, "Name of the peer; \"\" if not known yet.")
      .def_prop_ro(
          "type", [](const AppliedFault& a) { return static_cast<int>(a.type); }, "FrameType of the message.")
      .def_prop_ro("tag", [](const AppliedFault& a) { return static_cast<int>(a.tag); })
      .def_ro("nth", &AppliedFault::nth, "Number of the message among those that the rule is about.")
      .def_ro("link", &AppliedFault::link, "Description of the connection.");
  nb::class_<Faults>(m, "Faults", "Rules of faults of one worker; times are in nanoseconds.")
      .def(nb::init<std::string, std::uint64_t>(), "source"_a, "seed"_a)
      .def("add", add, nb::kw_only(), "id"_a, "action"_a, "destination"_a, "types"_a, "tag"_a, "without"_a, "nth"_a,
           "count"_a, "probability"_a, "delay"_a, "body"_a)
      .def("remove", &Faults::remove, "id"_a, "Remove a rule; return whether it was there.")
      .def("clear", &Faults::clear, "Remove all rules.")
      .def("release", &Faults::release, "Release the messages that rules hold back now.")
      .def("applied", &Faults::applied, "Return what the rules have done, in order.")
      .def("wait", &Faults::wait, "count"_a, "timeout"_a, nb::call_guard<GilReleased>(),
           "Wait until `count` faults have been applied.\n\n"
           "Returns False after the timeout.");
}

}  // namespace telegrad::python
