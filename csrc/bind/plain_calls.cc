// The calling side of the short way.
#include "bind/calls.h"
#include "bind/plain.h"
#include "bind/recorded.h"

using namespace nanobind::literals;

namespace telegrad::bind {
namespace {

constexpr std::uint64_t kNotPlain = ~std::uint64_t{0};  // no call has this id

/// What `PlainCalls.call` returns when there is no plain value to return.
struct Unusual {
  nb::object outcome;  // as Engine.call returns it; None: nothing has been sent
};

class PlainCalls {
 public:
  PlainCalls(nb::object engine, nb::object codec, const nb::object& recorder, Words words)
      : engine_object_(std::move(engine)),
        codec_object_(std::move(codec)),
        engine_(nb::cast<Engine&>(engine_object_)),
        codec_(nb::cast<codec::Codec&>(codec_object_)),
        recorder_(recorder),
        words_(words) {}

  nb::object call(std::int32_t peer, int flags, std::uint32_t name_id, nb::handle name, nb::handle args,
                  nb::handle kwargs, Nanos timeout, bool nested, nb::handle context) {
    auto m = write(peer, flags, name_id, name, args, kwargs, context);
    if (!m) return nb::cast(Unusual{nb::none()});
    CallOptions o;
    o.deadline = deadline_after(now(), timeout);
    o.nested = nested;
    Outcome outcome = call_and_wait(engine_, peer, std::move(m), std::move(o));
    take_lazy();
    if (is_plain_value(words_, outcome)) return decode_plain(codec_, outcome.reply);
    InContext in;
    if (!context.is_none() && is_recorded_value(words_, outcome) && Recorder::read(codec_, outcome.reply, in)) {
      const nb::object wrap = recorder_.wrap(in, peer, context);
      outcome.reply.segments.pop_back();
      return decode_plain(codec_, outcome.reply, wrap);
    }
    return nb::cast(Unusual{outcome_tuple(std::move(outcome))});
  }

  std::uint64_t start(std::int32_t peer, int flags, std::uint32_t name_id, nb::handle name, nb::handle args,
                      nb::handle kwargs, Nanos timeout, bool nested, bool never_wait, nb::handle future,
                      nb::handle context) {
    auto m = write(peer, flags, name_id, name, args, kwargs, context);
    return m ? begin(peer, std::move(m), timeout, nested, never_wait, false, false, future) : 0;
  }

  std::uint64_t make(std::int32_t peer, std::uint32_t name_id, nb::handle name, nb::handle args, nb::handle kwargs,
                     nb::handle local_id, Nanos timeout, bool nested, bool never_wait, nb::handle cookie) {
    const nb::object value = nb::steal(PyTuple_Pack(3, args.ptr(), kwargs.ptr(), local_id.ptr()));
    if (!value.is_valid()) throw nb::python_error();
    std::unique_ptr<Outgoing> m;
    try {
      m = encode_plain(codec_, words_, words_.make, words_.may_linger, value);
    } catch (const nb::python_error& e) {
      if (!e.matches(PyExc_Exception)) throw;  // else the other way says what is wrong, and that nothing has been sent
    }
    if (!m) return 0;
    set_name(*m, name_id, name);
    return begin(peer, std::move(m), timeout, nested, never_wait, true, true, cookie);
  }

  std::uint64_t ask(std::int32_t peer, nb::handle messages, Nanos timeout, nb::handle cookie) {
    auto m = encode_plain(codec_, words_, words_.gradients, 0, messages);
    if (!m) return kNotPlain;
    return begin(peer, std::move(m), timeout, true, true, true, false, cookie);
  }

  nb::object answer(std::uint64_t call, Nanos timeout) {
    Outcome outcome;
    if (!take_outcome(engine_, call, timeout, outcome)) return nb::none();
    const FrameHeader& h = outcome.reply.header;
    if (outcome.status != CallStatus::kReplied || h.tag != words_.gradients || h.flags & words_.reply_flags)
      return nb::cast(Unusual{outcome_tuple(std::move(outcome))});
    return decode_plain(codec_, outcome.reply);
  }

  bool tell(std::int32_t peer, nb::handle value) {
    auto m = encode_plain(codec_, words_, words_.ended, 0, value);
    if (!m) return false;
    {
      nb::gil_scoped_release no_gil;
      engine_.send(peer, std::move(m));
    }
    release_references();
    return true;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(engine_object_.ptr());
    Py_VISIT(codec_object_.ptr());
    return recorder_.traverse(visit, arg);
  }

 private:
  std::uint64_t begin(std::int32_t peer, std::unique_ptr<Outgoing> m, Nanos timeout, bool nested, bool never_wait,
                      bool lazy, bool aside, nb::handle goes_with_outcome) {
    CallOptions o;
    o.deadline = deadline_after(now(), timeout);
    o.nested = nested;
    o.lazy = lazy;
    o.aside = aside;
    auto cookie = std::make_unique<References>();
    cookie->add(goes_with_outcome);
    o.cookie = std::move(cookie);
    return begin_call(engine_, peer, std::move(m), std::move(o), never_wait);
  }

  /// Hands on what has come of lazy calls meanwhile, sooner than the pool would.
  void take_lazy() {
    Item item;
    while (engine_.take_lazy(item)) {
      auto& cookie = static_cast<References&>(*item.cookie);
      const nb::object taker = nb::borrow(cookie.front());
      cookie.release();
      const nb::object outcome = outcome_tuple(std::move(item.outcome));
      const nb::object done = nb::steal(PyObject_CallOneArg(taker.ptr(), outcome.ptr()));
      if (!done.is_valid()) PyErr_WriteUnraisable(taker.ptr());
    }
  }

  std::unique_ptr<Outgoing> write(std::int32_t peer, int flags, std::uint32_t name_id, nb::handle name, nb::handle args,
                                  nb::handle kwargs, nb::handle context) {
    const nb::object value = nb::steal(PyTuple_Pack(2, args.ptr(), kwargs.ptr()));
    if (!value.is_valid()) throw nb::python_error();
    auto m = context.is_none() ? encode_plain(codec_, words_, words_.call, flags, value)
                               : recorder_.encode(codec_, words_, words_.call, flags, value, peer, context, true);
    if (m) set_name(*m, name_id, name);
    return m;
  }

  nb::object engine_object_, codec_object_;
  Engine& engine_;
  codec::Codec& codec_;
  Recorder recorder_;
  const Words words_;
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<PlainCalls>(self)->traverse(visit, arg) : 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {0, nullptr}};

}  // namespace

void init_plain_calls(nb::module_& m) {
  nb::class_<Unusual>(m, "Unusual", "What `PlainCalls.call` returns when there is no plain value to return.")
      .def_ro("outcome", &Unusual::outcome, "As `Engine.call` returns it; None: the call is not plain, and not made.");

  nb::class_<PlainCalls>(m, "PlainCalls", nb::type_slots(slots),
                         "The short way for calls that carry only plain values.")
      .def(
          "__init__",
          [](PlainCalls* self, nb::object engine, nb::object codec, nb::object recorder, int call, int value, int make,
             int gradients, int ended, int may_linger, int reply_flags, std::uint64_t max_body, int preamble) {
            new (self) PlainCalls(std::move(engine), std::move(codec), recorder,
                                  Words{.call = call,
                                        .value = value,
                                        .make = make,
                                        .may_linger = may_linger,
                                        .reply_flags = reply_flags,
                                        .max_body = max_body,
                                        .gradients = gradients,
                                        .ended = ended,
                                        .preamble = preamble});
          },
          nb::kw_only(), "engine"_a, "codec"_a, "recorder"_a, "call"_a, "value"_a, "make"_a, "gradients"_a, "ended"_a,
          "may_linger"_a, "reply_flags"_a, "max_body"_a, "preamble"_a)
      .def("call", &PlainCalls::call, "peer"_a, "flags"_a, "name_id"_a, "name"_a, "args"_a, "kwargs"_a, "timeout"_a,
           "nested"_a, "context"_a.none(), "Runs a function on a peer and waits. Its value, or `Unusual`.")
      .def("start", &PlainCalls::start, "peer"_a, "flags"_a, "name_id"_a, "name"_a, "args"_a, "kwargs"_a, "timeout"_a,
           "nested"_a, "never_wait"_a, "future"_a, "context"_a.none(),
           "Runs a function on a peer; what comes of it goes to the pool with `future`. The call's id; 0: the call is "
           "not plain, or the engine has been stopped, and it is not made.")
      .def("make", &PlainCalls::make, "peer"_a, "name_id"_a, "name"_a, "args"_a, "kwargs"_a, "local_id"_a, "timeout"_a,
           "nested"_a, "never_wait"_a, "cookie"_a,
           "Runs a function on a peer, which keeps the result as the reference of this worker's that has the id; that "
           "it does is told to `cookie`, which is called with the outcome after a while: by the pool, or by a thread "
           "that makes a call. Returns as `start` does.")
      .def("ask", &PlainCalls::ask, "peer"_a, "messages"_a, "timeout"_a, "cookie"_a,
           "Sends messages of a backward pass. The outcome is for `answer`, or for `cookie`, which the pool calls with "
           "it if nobody takes it. The call's id; 0: the engine has been stopped; NOT_PLAIN: nothing has been sent.")
      .def("answer", &PlainCalls::answer, "call"_a, "timeout"_a,
           "Waits for the answer, as `Engine.wait`: messages, `Unusual`, or None.")
      .def("tell", &PlainCalls::tell, "peer"_a, "value"_a,
           "Sends a peer the word that an autograd context has ended. False: the value is not plain.")
      .def_ro_static("NOT_PLAIN", &kNotPlain);
}

}  // namespace telegrad::bind
