// The calling side of the short way.
#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "bind/calls.h"
#include "bind/direct.h"
#include "bind/interruption.h"
#include "bind/plain.h"
#include "bind/recorded.h"
#include "codec/gil.h"

using namespace nanobind::literals;

namespace telegrad::bind {
namespace {

/// What a program gives as arguments. False: Python must look.
bool as_arguments(nb::handle args, nb::handle kwargs, nb::object& given, nb::object& named) {
  const bool none = args.is_none();
  if (!none && !PyTuple_CheckExact(args.ptr()) && !PyList_CheckExact(args.ptr())) return false;
  if (!kwargs.is_none() && !PyDict_CheckExact(kwargs.ptr())) return false;
  given = none ? nb::steal(PyTuple_New(0)) : nb::borrow(args);
  named = kwargs.is_none() ? nb::steal(PyDict_New()) : nb::borrow(kwargs);
  return given.is_valid() && named.is_valid();
}

constexpr std::uint64_t kNotPlain = ~std::uint64_t{0};  // no call has this id

/// What `PlainCalls.call` returns when there is no plain value to return.
struct Unusual {
  nb::object outcome;  // as Engine.call returns it; None: nothing has been sent
};

class PlainCalls {
 public:
  PlainCalls(nb::object engine, nb::object codec, const nb::object& recorder, Surroundings around, Words words)
      : engine_object_(std::move(engine)),
        codec_object_(std::move(codec)),
        engine_(nb::cast<Engine&>(engine_object_)),
        codec_(nb::cast<codec::Codec&>(codec_object_)),
        recorder_(recorder),
        direct_(std::move(around)),
        words_(words) {}

  nb::object call(std::int32_t peer, int flags, std::uint32_t name_id, nb::handle name, nb::handle args,
                  nb::handle kwargs, Nanos timeout, bool nested, nb::handle context) {
    auto m = write(peer, flags, name_id, name, args, kwargs, context);
    if (!m) return nb::cast(Unusual{nb::none()});
    CallOptions o;
    o.deadline = deadline_after(now(), timeout);
    o.nested = nested;
    Outcome outcome = call_and_wait(engine_, peer, std::move(m), std::move(o), [this] { take_lazy(); });
    if (is_plain_value(words_, outcome)) return decode_plain(codec_, outcome.reply);
    InContext in;
    if (!context.is_none() && is_recorded_value(words_, outcome) && Recorder::read(codec_, outcome.reply, in)) {
      const nb::object wrap = recorder_.wrap(in, peer, context);
      outcome.reply.segments.pop_back();
      return decode_plain(codec_, outcome.reply, wrap);
    }
    return nb::cast(Unusual{outcome_tuple(std::move(outcome))});
  }

  nb::object call_directly(nb::handle to, nb::handle function, nb::handle args, nb::handle kwargs, Nanos timeout) {
    Addressed a;
    nb::object given, named;
    if (!as_arguments(args, kwargs, given, named) || !direct_.address(to, function, a)) {
      return nb::cast(Unusual{nb::none()});
    }
    return call(a.peer, 0, a.number, a.text, given, named, timeout, false, nb::none());
  }

  nb::object start_directly(nb::handle calls, nb::handle to, nb::handle function, nb::handle args, nb::handle kwargs,
                            nb::handle timeout) {
    Addressed a;
    nb::object given, named;
    if (!as_arguments(args, kwargs, given, named) || !direct_.address(to, function, a)) return nb::none();
    auto m = write(a.peer, 0, a.number, a.text, given, named, nb::none());
    if (!m) return nb::none();
    nb::object future = direct_.future(calls, function, a.peer, timeout);
    const bool never_wait = direct_.in_event_loop();
    const auto id = begin(a.peer, std::move(m), nb::cast<Nanos>(timeout), false, never_wait, false, false, future);
    if (id == 0) return nb::none();
    direct_.set_call(future, id);
    return future;
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
      m = encode_plain(codec_, words_.make, words_.may_linger, value);
    } catch (const nb::python_error& e) {
      if (!e.matches(PyExc_Exception)) throw;  // else the other way says what is wrong, and that nothing has been sent
    }
    if (!m) return 0;
    const auto name_size = static_cast<std::uint64_t>(PyBytes_GET_SIZE(name.ptr()));
    if (m->payload_size() + name_size >= kAlwaysTaken) name_target(*m, local_id);
    set_name(*m, name_id, name);
    std::uint64_t begun = 0;
    try {
      begin(peer, std::move(m), timeout, nested, never_wait, true, true, cookie, &begun);
    } catch (const nb::python_error&) {  // a signal handler's
      if (begun != 0) direct_.set_call(cookie, begun);
      throw;
    }
    if (begun == 0) return 0;
    direct_.set_call(cookie, begun);  // here: Python runs signal handlers between a call and what it does next
    take_lazy();                      // while the peer is at it
    return begun;
  }

  std::uint64_t make_directly(std::int32_t peer, nb::handle function, nb::handle args, nb::handle kwargs,
                              nb::handle local_id, Nanos timeout, nb::handle cookie) {
    Addressed a;
    nb::object given, named;
    try {
      if (!as_arguments(args, kwargs, given, named) || !direct_.knows(function, a)) return 0;
    } catch (const nb::python_error& e) {
      if (!e.matches(PyExc_Exception)) throw;  // else the other way says what is wrong
      return 0;
    }
    return make(peer, a.number, a.text, given, named, local_id, timeout, false, direct_.in_event_loop(), cookie);
  }

  std::uint64_t ask(std::int32_t peer, nb::handle messages, Nanos timeout, nb::handle cookie) {
    auto m = encode_plain(codec_, words_.gradients, 0, messages);
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

  nb::object collect(const nb::list& futures, const nb::list& ids, nb::list results, nb::handle complete,
                     nb::handle end, nb::handle tell_when_done) {
    Collecting collecting(*this, end);
    std::vector<std::pair<std::uint64_t, std::size_t>> places;
    for (std::size_t i = 0; i < ids.size(); ++i) places.emplace_back(nb::cast<std::uint64_t>(ids[i]), i);
    std::sort(places.begin(), places.end());
    for (const auto& [id, place] : places) {
      auto& calls = collecting.collector.calls;
      if (calls.empty() || calls.back() != id) calls.push_back(id);  // one may be given twice
    }
    if (!engine_.collect(collecting.collector)) return nb::bool_(false);
    const auto place_of = [&places](std::uint64_t call) {
      return std::lower_bound(places.begin(), places.end(), std::pair{call, std::size_t{0}})->second;
    };
    std::vector<nb::object> elsewhere;
    for (const std::uint64_t call : collecting.collector.elsewhere) {
      nb::object future = futures[place_of(call)];
      if (!is_done(future)) in_python([&] { tell_when_done(future); });
      elsewhere.push_back(std::move(future));
    }
    Interruption interruption;
    const auto interrupted = interruption.ask();
    while (true) {
      for (std::size_t i = 0; i < elsewhere.size(); ++i) {
        if (!is_done(elsewhere[i])) continue;
        const nb::object failure = in_python([&] { return elsewhere[i].attr("failure")(); });
        if (!failure.is_none()) return elsewhere[i];
        std::swap(elsewhere[i--], elsewhere.back());
        elsewhere.pop_back();
      }
      WaitEnd ended;
      {
        const GilReleased no_gil;
        ended = engine_.wait(collecting.collector, interrupted, collecting.ready);
      }
      release_references();
      if (ended == WaitEnd::kInterrupted) nb::raise_python_error();
      if (collecting.ready.empty() && (collecting.collector.over || ended == WaitEnd::kStopped)) return nb::none();
      while (!collecting.ready.empty()) {
        Item item = std::move(collecting.ready.front());
        collecting.ready.pop_front();
        const std::size_t place = place_of(item.message.header.call_id);
        if (!bring(item, place, results, complete, end)) return futures[place];
      }
    }
  }

  void tell_collectors() { engine_.tell_collectors(); }

  bool tell(std::int32_t peer, nb::handle value) {
    auto m = encode_plain(codec_, words_.ended, 0, value);
    if (!m) return false;
    {
      const GilReleased no_gil;
      engine_.send(peer, std::move(m));
    }
    release_references();
    return true;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(engine_object_.ptr());
    Py_VISIT(codec_object_.ptr());
    if (const int visited = direct_.traverse(visit, arg)) return visited;
    return recorder_.traverse(visit, arg);
  }

 private:
  std::uint64_t begin(std::int32_t peer, std::unique_ptr<Outgoing> m, Nanos timeout, bool nested, bool never_wait,
                      bool lazy, bool aside, nb::handle goes_with_outcome, std::uint64_t* begun = nullptr) {
    CallOptions o;
    o.deadline = deadline_after(now(), timeout);
    o.nested = nested;
    o.lazy = lazy;
    o.aside = aside;
    auto cookie = std::make_unique<References>();
    cookie->add(goes_with_outcome);
    o.cookie = std::move(cookie);
    return begin_call(engine_, peer, std::move(m), std::move(o), never_wait, begun);
  }

  /// What a thread waits for that collects outcomes. However that ends, the pool has the rest; or this thread, if
  /// nobody is in the pool any more.
  struct Collecting {
    Collecting(PlainCalls& calls, nb::handle end) : calls(calls), end(end) {}
    ~Collecting() {
      calls.engine_.stop_collecting(collector, ready);
      for (Item& item : ready) {
        try {
          const nb::object future = taker_of(item);
          in_python([&] { end(future, outcome_tuple(std::move(item.outcome)), nb::none()); });
        } catch (nb::python_error& e) {
          e.discard_as_unraisable(end);
        }
      }
    }
    Collecting(const Collecting&) = delete;
    Collecting& operator=(const Collecting&) = delete;

    PlainCalls& calls;
    const nb::handle end;
    Collector collector;
    std::deque<Item> ready;
  };

  /// Who was to have the outcome: a future, or what is called with it.
  static nb::object taker_of(Item& item) {
    auto& cookie = static_cast<References&>(*item.cookie);
    nb::object taker = nb::borrow(cookie.front());
    cookie.release();
    return taker;
  }

  static bool is_done(const nb::object& future) { return nb::cast<bool>(future.attr("done")()); }

  /// Ends a future with what has come of its call. False: it has failed.
  bool bring(Item& item, std::size_t place, nb::list& results, nb::handle complete, nb::handle end) {
    const nb::object future = taker_of(item);
    nb::object error;
    try {
      if (!is_plain_value(words_, item.outcome)) {
        return !nb::cast<bool>(
            in_python([&] { return end(future, outcome_tuple(std::move(item.outcome)), nb::none()); }));
      }
      nb::object value = decode_plain(codec_, item.outcome.reply);
      in_python([&] { complete(future, value); });
      results[place] = std::move(value);
      return true;
    } catch (nb::python_error& e) {
      if (is_done(future)) throw;
      error = nb::borrow(e.value());  // the value cannot be read, or a signal handler's: nobody else has the outcome
    }
    return !nb::cast<bool>(in_python([&] { return end(future, nb::none(), error); }));
  }

  /// Hands on what has come of lazy calls meanwhile, sooner than the pool would.
  void take_lazy() {
    Item item;
    while (engine_.take_lazy(item)) {
      const nb::object taker = taker_of(item);
      const nb::object outcome = outcome_tuple(std::move(item.outcome));
      const nb::object done = nb::steal(call_python(taker.ptr(), outcome.ptr()));
      if (!done.is_valid()) PyErr_WriteUnraisable(taker.ptr());
    }
  }

  /// A request that may arrive without its content says in its preamble, too, which reference it is to make.
  void name_target(Outgoing& m, nb::handle local_id) const {
    const nb::object preamble =
        nb::make_tuple(nb::tuple(), nb::make_tuple(engine_.id(), local_id), nb::none(), nb::none(), 0, nb::none());
    codec::Encoded written;
    if (!encodes(codec_.encode_basic(preamble.ptr(), written))) return;
    add_segment(m, PyBytes_AS_STRING(written.body.ptr()),
                static_cast<std::uint64_t>(PyBytes_GET_SIZE(written.body.ptr())), written.body);
    m.header.flags |= static_cast<std::uint16_t>(words_.preamble);
  }

  std::unique_ptr<Outgoing> write(std::int32_t peer, int flags, std::uint32_t name_id, nb::handle name, nb::handle args,
                                  nb::handle kwargs, nb::handle context) {
    const nb::object value = nb::steal(PyTuple_Pack(2, args.ptr(), kwargs.ptr()));
    if (!value.is_valid()) throw nb::python_error();
    auto m = context.is_none() ? encode_plain(codec_, words_.call, flags, value)
                               : recorder_.encode(codec_, words_, words_.call, flags, value, peer, context, true);
    if (m) set_name(*m, name_id, name);
    return m;
  }

  nb::object engine_object_, codec_object_;
  Engine& engine_;
  codec::Codec& codec_;
  Recorder recorder_;
  Direct direct_;
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
             int gradients, int ended, int may_linger, int reply_flags, int preamble, nb::object current,
             nb::dict infos, nb::object info_type, nb::dict known, nb::set by_value, nb::dict profiling,
             nb::object is_grad_enabled, nb::object running_loop, nb::object future_type, nb::object no_devices) {
            new (self) PlainCalls(std::move(engine), std::move(codec), recorder,
                                  Surroundings{.current = std::move(current),
                                               .infos = std::move(infos),
                                               .info_type = std::move(info_type),
                                               .known = std::move(known),
                                               .by_value = std::move(by_value),
                                               .profiling = std::move(profiling),
                                               .is_grad_enabled = std::move(is_grad_enabled),
                                               .running_loop = std::move(running_loop),
                                               .future_type = std::move(future_type),
                                               .no_devices = std::move(no_devices)},
                                  Words{.call = call,
                                        .value = value,
                                        .make = make,
                                        .may_linger = may_linger,
                                        .reply_flags = reply_flags,
                                        .gradients = gradients,
                                        .ended = ended,
                                        .preamble = preamble});
          },
          nb::kw_only(), "engine"_a, "codec"_a, "recorder"_a, "call"_a, "value"_a, "make"_a, "gradients"_a, "ended"_a,
          "may_linger"_a, "reply_flags"_a, "preamble"_a, "current"_a, "infos"_a, "info_type"_a, "known"_a, "by_value"_a,
          "profiling"_a, "is_grad_enabled"_a, "running_loop"_a, "future_type"_a, "no_devices"_a)
      .def("call_directly", &PlainCalls::call_directly, "to"_a.none(), "function"_a.none(), "args"_a.none(),
           "kwargs"_a.none(), "timeout"_a,
           "As `call`, of a call that the program makes outside of any request: the worker `to` is a name, an id or a\n"
           "WorkerInfo. `Unusual` without an outcome where Python must look.")
      .def("start_directly", &PlainCalls::start_directly, "calls"_a, "to"_a.none(), "function"_a.none(),
           "args"_a.none(), "kwargs"_a.none(), "timeout"_a,
           "As `start`, likewise; the future, which it makes, or None.")
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
           "that makes a call. Returns as `start` does, and sets the cookie's `_call`, also if a signal handler raises "
           "once the call is under way.")
      .def("make_directly", &PlainCalls::make_directly, "peer"_a, "function"_a.none(), "args"_a.none(),
           "kwargs"_a.none(), "local_id"_a, "timeout"_a, "cookie"_a,
           "As `make`, of a call that the program makes outside of any request. 0 where Python must look, too.")
      .def("ask", &PlainCalls::ask, "peer"_a, "messages"_a, "timeout"_a, "cookie"_a,
           "Sends messages of a backward pass. The outcome is for `answer`, or for `cookie`, which the pool calls with "
           "it if nobody takes it. The call's id; 0: the engine has been stopped; NOT_PLAIN: nothing has been sent.")
      .def("answer", &PlainCalls::answer, "call"_a, "timeout"_a,
           "Waits for the answer, as `Engine.wait`: messages, `Unusual`, or None.")
      .def(
          "collect", &PlainCalls::collect, "futures"_a, "calls"_a, "results"_a, "complete"_a, "end"_a,
          "tell_when_done"_a,
          "Waits for calls that were begun and completes their futures, in this thread, as their outcomes come:\n"
          "complete(future, value) where that is plain, and the value is put into the list of results, else\n"
          "end(future, outcome, error), which returns whether it has failed. One that another thread has in hand is\n"
          "given to tell_when_done(future), which sees to it that `tell_collectors` is called. Returns the first that\n"
          "has failed; None: none has, though others may have some in hand. False: somebody else waits for one of\n"
          "them, and nothing has been done. Raises what a signal handler raises.")
      .def("tell_collectors", &PlainCalls::tell_collectors,
           "A future is done that another thread had in hand when one began to collect.")
      .def("tell", &PlainCalls::tell, "peer"_a, "value"_a,
           "Sends a peer the word that an autograd context has ended. False: the value is not plain.")
      .def_ro_static("NOT_PLAIN", &kNotPlain);
}

}  // namespace telegrad::bind
