#include "python/client.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "codec/gil.h"
#include "python/calls.h"
#include "python/completion.h"
#include "python/context_manager.h"
#include "python/errors.h"
#include "python/metadata.h"
#include "python/prepare.h"
#include "python/signal_check.h"
#include "python/wire.h"

using namespace nanobind::literals;

namespace telegrad::python {
namespace {

constexpr std::uint64_t kNotEncodable = ~std::uint64_t{0};  // no call has this id

/// Reply to messages of a backward pass that is no list of messages.
struct OtherReply {
  nb::object completion;  // see wire::CompletionField
};

std::unique_ptr<PyRefs> refs_to(nb::handle object) {
  auto refs = std::make_unique<PyRefs>();
  refs->add(object);
  return refs;
}

class Client {
 public:
  Client(nb::object engine, nb::object codec, const nb::object& hooks, const nb::object& calls,
         const nb::object& environment)
      : engine_object_(std::move(engine)),
        codec_object_(std::move(codec)),
        engine_(nb::cast<Engine&>(engine_object_)),
        codec_(nb::cast<codec::Codec&>(codec_object_)),
        autograd_(hooks),
        preparer_(engine_, codec_, autograd_, calls, environment),
        completions_(codec_, autograd_, calls, preparer_.future_type()),
        send_(calls.attr("send")),
        send_and_wait_(calls.attr("send_and_wait")),
        not_initialized_(environment.attr("not_initialized")) {}

  nb::object call(nb::handle to, nb::handle function, nb::handle args, nb::handle kwargs, Nanos timeout,
                  nb::handle receiver, bool introduce) {
    PreparedCall call = preparer_.prepare({.mode = CallMode::kSync,
                                           .to = to,
                                           .function = function,
                                           .args = args,
                                           .kwargs = kwargs,
                                           .timeout = timeout,
                                           .receiver = receiver,
                                           .introduce = introduce});
    return call.message ? wait_for(call) : python_result(call_python(send_and_wait_.ptr(), call.request.ptr()));
  }

  nb::object start(nb::handle to, nb::handle function, nb::handle args, nb::handle kwargs, Nanos timeout,
                   nb::handle receiver, bool introduce, bool internal, bool polled) {
    PreparedCall call = preparer_.prepare({.mode = CallMode::kAsync,
                                           .to = to,
                                           .function = function,
                                           .args = args,
                                           .kwargs = kwargs,
                                           .timeout = timeout,
                                           .receiver = receiver,
                                           .introduce = introduce,
                                           .internal = internal});
    nb::object future = preparer_.future(call);
    if (call.message) {
      begin(call, false, future, polled);
    } else {
      python_result(call_python(send_.ptr(), call.request.ptr(), future.ptr()));
    }
    return future;
  }

  void create(nb::handle to, nb::handle function, nb::handle args, nb::handle kwargs, Nanos timeout,
              nb::handle local_id, nb::handle creation, nb::handle receiver) {
    PreparedCall call = preparer_.prepare({.mode = CallMode::kRemote,
                                           .to = to,
                                           .function = function,
                                           .args = args,
                                           .kwargs = kwargs,
                                           .timeout = timeout,
                                           .receiver = receiver,
                                           .introduce = !receiver.is_none(),
                                           .keep_as = local_id});
    if (call.message) {
      begin(call, true, creation);
      take_deferred();  // while the peer runs the call
    } else {
      python_result(call_python(send_.ptr(), call.request.ptr(), creation.ptr()));
    }
  }

  nb::object call_request(nb::handle request) {
    PreparedCall call = prepared(request);
    return wait_for(call);
  }

  void start_request(nb::handle request, nb::handle target) {
    PreparedCall call = prepared(request);
    begin(call, !request.attr("keep_as").is_none(), target);
  }

  bool wait(nb::handle future, std::uint64_t call, Nanos timeout) {
    Completion completion;
    if (!take_completion(engine_, call, timeout, completion)) return false;
    completions_.complete(future, std::move(completion));
    return true;
  }

  bool cancel(std::uint64_t call) {
    WorkItem taken;
    if (!cancel_call(engine_, call, taken)) return false;
    if (taken.target) completions_.complete(target_of(taken), taken.take_completion());
    return true;
  }

  void expire(std::uint64_t call) {
    const GilReleased no_gil;
    engine_.expire_soon(call);
  }

  nb::object complete_many(const nb::list& futures, const nb::list& ids, nb::list results,
                           nb::handle notify_when_done) {
    WaitSetScope waiting(*this);
    std::vector<std::pair<std::uint64_t, std::size_t>> places;
    for (std::size_t i = 0; i < ids.size(); ++i) places.emplace_back(nb::cast<std::uint64_t>(ids[i]), i);
    std::sort(places.begin(), places.end());
    for (const auto& [id, place] : places) {
      auto& calls = waiting.wait_set.calls;
      if (calls.empty() || calls.back() != id) calls.push_back(id);  // a call may be given twice
    }
    if (!engine_.add_wait_set(waiting.wait_set)) return nb::bool_(false);
    const auto place_of = [&places](std::uint64_t call) {
      return std::lower_bound(places.begin(), places.end(), std::pair{call, std::size_t{0}})->second;
    };
    std::vector<nb::object> taken_elsewhere;
    for (const std::uint64_t call : waiting.wait_set.taken_elsewhere) {
      nb::object future = futures[place_of(call)];
      if (!is_done(future)) in_python([&] { notify_when_done(future); });
      taken_elsewhere.push_back(std::move(future));
    }
    SignalCheck signals;
    const auto interrupted = signals.ask();
    while (true) {
      for (std::size_t i = 0; i < taken_elsewhere.size(); ++i) {
        if (!is_done(taken_elsewhere[i])) continue;
        if (has_failed(taken_elsewhere[i])) return taken_elsewhere[i];
        std::swap(taken_elsewhere[i--], taken_elsewhere.back());
        taken_elsewhere.pop_back();
      }
      WaitEnd ended;
      {
        const GilReleased no_gil;
        ended = engine_.wait(waiting.wait_set, interrupted, waiting.ready);
      }
      decref_deferred();
      if (ended == WaitEnd::kInterrupted) nb::raise_python_error();
      if (waiting.ready.empty() && (waiting.wait_set.exhausted || ended == WaitEnd::kStopped)) return nb::none();
      while (!waiting.ready.empty()) {
        WorkItem item = std::move(waiting.ready.front());
        waiting.ready.pop_front();
        const std::size_t place = place_of(item.message.header.call_id);
        const nb::object future = target_of(item);
        nb::object value = completions_.complete(future, item.take_completion());
        if (value.is_valid()) {
          results[place] = std::move(value);
        } else if (has_failed(future)) {
          return futures[place];
        }
      }
    }
  }

  nb::tuple read_scope(Nanos timeout) {
    PreparedCall call;
    preparer_.read_scope(call, timeout);
    return nb::make_tuple(call.context, call.timeout, call.depth);
  }

  void notify_wait_sets() { engine_.notify_wait_sets(); }

  // ---- messages of autograd

  std::uint64_t send_gradients(std::int32_t peer, nb::handle messages, Nanos timeout, nb::handle target,
                               nb::handle encoded) {
    auto message = encoded.is_none() ? encode_basic(codec_, wire::kGradients, wire::kMustRun, messages)
                                     : compose_encoded(wire::kGradients, wire::kMustRun, encoded);
    if (!message) return kNotEncodable;
    CallOptions o;
    o.deadline = deadline_after(now(), timeout);
    o.nested = true;
    o.background = true;
    o.target = refs_to(target);
    return begin_call(engine_, peer, std::move(message), std::move(o), true);
  }

  nb::object await_gradients(std::uint64_t call, Nanos timeout) {
    Completion completion;
    if (!take_completion(engine_, call, timeout, completion)) return nb::none();
    const FrameHeader& h = completion.reply.header;
    if (completion.status != CallStatus::kReplied || h.tag != wire::kGradients || h.flags & wire::kSlowReply)
      return nb::cast(OtherReply{completion_tuple(std::move(completion))});
    return decode_body(codec_, completion.reply);
  }

  bool notify_context_ended(std::int32_t peer, nb::handle value, std::int64_t epoch) {
    auto m = encode_basic(codec_, wire::kContextEnded, 0, value);
    if (!m) return false;
    m->epoch = epoch;
    {
      const GilReleased no_gil;
      engine_.send(peer, std::move(m));
    }
    decref_deferred();
    return true;
  }

  int traverse(visitproc visit, void* arg) const {
    for (const nb::object* o : {&engine_object_, &codec_object_, &send_, &send_and_wait_, &not_initialized_})
      Py_VISIT(o->ptr());
    if (const int visited = preparer_.traverse(visit, arg)) return visited;
    if (const int visited = completions_.traverse(visit, arg)) return visited;
    return autograd_.traverse(visit, arg);
  }

 private:
  static CallOptions options_of(const PreparedCall& call) {
    CallOptions o;
    o.deadline = deadline_after(now(), call.timeout);
    o.nested = call.depth > 0;
    o.depth = call.depth;
    if (call.keep_alive.is_valid() && !call.keep_alive.is_none()) o.keep_alive = refs_to(call.keep_alive);
    return o;
  }

  /// Prepares a request that Python has encoded and an interceptor has passed on.
  static PreparedCall prepared(nb::handle request) {
    PreparedCall call;
    call.peer = nb::cast<std::int32_t>(request.attr("peer"));
    call.message = compose_request(request);
    call.keep_alive = request.attr("keep");
    call.label = request.attr("label");
    call.timeout = nb::cast<Nanos>(request.attr("timeout"));
    call.depth = nb::cast<std::uint32_t>(request.attr("depth"));
    call.in_scope = true;
    return call;
  }

  nb::object wait_for(PreparedCall& call) {
    Completion completion =
        call_and_wait(engine_, call.peer, std::move(call.message), options_of(call), [this] { take_deferred(); });
    return completions_.value(std::move(completion), call.context, call.label, call.timeout);
  }

  /// Sends a call and records its id in its target, even if a signal handler raises meanwhile. Then a call that creates
  /// nothing is canceled: nothing gets its future.
  void begin(PreparedCall& call, bool creates, nb::handle target, bool polled = false) {
    const bool in_event_loop = preparer_.in_event_loop();
    CallOptions o = options_of(call);
    o.polled = polled && !in_event_loop;
    o.background = o.deferrable = creates;
    o.target = refs_to(target);
    std::uint64_t begun = 0;
    try {
      begin_call(engine_, call.peer, std::move(call.message), std::move(o), in_event_loop, &begun);
    } catch (const nb::python_error&) {
      if (begun != 0) preparer_.set_call(target, begun);
      if (begun != 0 && !creates) abandon(target);
      throw;
    }
    if (begun == 0) {
      PyErr_SetNone(not_initialized_.ptr());
      throw nb::python_error();
    }
    preparer_.set_call(target, begun);  // not in Python, which may run signal handlers before the next bytecode
  }

  static void abandon(nb::handle future) {
    try {
      python_result(PyObject_CallMethod(future.ptr(), "_abandon", nullptr));
    } catch (nb::python_error& e) {
      e.discard_as_unraisable(future);
    }
  }

  /// Scope of a thread that waits for a wait set. At its end, the remaining completions go to the thread pool, or to
  /// this thread if the pool has ended.
  struct WaitSetScope {
    explicit WaitSetScope(Client& client) : client(client) {}
    ~WaitSetScope() {
      client.engine_.remove_wait_set(wait_set, ready);
      for (WorkItem& item : ready) {
        const nb::object future = target_of(item);
        try {
          client.completions_.complete(future, item.take_completion());
        } catch (nb::python_error& e) {
          e.discard_as_unraisable(future);
        }
      }
    }
    WaitSetScope(const WaitSetScope&) = delete;
    WaitSetScope& operator=(const WaitSetScope&) = delete;

    Client& client;
    WaitSet wait_set;
    std::deque<WorkItem> ready;
  };

  /// Returns the completion target, a future or another part of Telegrad, and releases the item's reference to it.
  static nb::object target_of(WorkItem& item) {
    auto& refs = static_cast<PyRefs&>(*item.target);
    nb::object target = nb::borrow(refs.front());
    refs.release();
    return target;
  }

  static bool is_done(const nb::object& future) { return nb::cast<bool>(future.attr("done")()); }

  static bool has_failed(const nb::object& future) {
    return !in_python([&] { return nb::object(future.attr("failure")()); }).is_none();
  }

  /// Processes deferred completions now instead of leaving them to the thread pool. Then raises what a signal handler
  /// has raised to end the program.
  void take_deferred() {
    std::optional<nb::python_error> interrupt;
    while (true) {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();  // before it would interrupt the processing of an item
      WorkItem item;
      if (!engine_.take_deferred(item)) break;
      const nb::object target = target_of(item);
      try {
        completions_.complete(target, item.take_completion());
      } catch (nb::python_error& e) {
        if (interrupt || e.matches(PyExc_Exception)) {
          e.discard_as_unraisable(target);
        } else {
          interrupt.emplace(std::move(e));
        }
      }
    }
    if (interrupt) {
      interrupt->restore();
      throw nb::python_error();
    }
  }

  nb::object engine_object_, codec_object_;
  Engine& engine_;
  codec::Codec& codec_;
  AutogradHooks autograd_;
  Preparer preparer_;
  Completions completions_;
  nb::object send_, send_and_wait_, not_initialized_;
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Client>(self)->traverse(visit, arg) : 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {0, nullptr}};

}  // namespace

void init_client(nb::module_& m) {
  nb::class_<OtherReply>(m, "OtherReply", "Reply to messages of a backward pass that is no list of messages.")
      .def_ro("completion", &OtherReply::completion, "Completion of the call, see `telegrad.wire.CompletionField`.");

  nb::class_<Client>(
      m, "Client", nb::type_slots(slots),
      "The calling side of a worker.\n\n"
      "`to` is a worker's name, id or info. `receiver` is a reference on whose value the owner runs the call:\n"
      "`function` is then None for the value itself, the name of a method, or a function of the value;\n"
      "`introduce` means that the owner may not know the reference yet. Times are in nanoseconds.")
      .def(nb::init<nb::object, nb::object, const nb::object&, const nb::object&, const nb::object&>(), "engine"_a,
           "codec"_a, "hooks"_a, "calls"_a, "environment"_a)
      .def("call", &Client::call, "to"_a.none(), "function"_a.none(), "args"_a.none(), "kwargs"_a.none(), "timeout"_a,
           "receiver"_a = nb::none(), "introduce"_a = false,
           nb::sig("def call(self, to: object, function: object, args: object, kwargs: object, timeout: int, receiver: "
                   "object = None, introduce: bool = False) -> typing.Any"),
           "Run a function on a peer and wait for its value.")
      .def("start", &Client::start, "to"_a.none(), "function"_a.none(), "args"_a.none(), "kwargs"_a.none(), "timeout"_a,
           "receiver"_a = nb::none(), "introduce"_a = false, "internal"_a = false, "polled"_a = false,
           nb::sig(
               "def start(self, to: object, function: object, args: object, kwargs: object, timeout: int, receiver: "
               "object = None, introduce: bool = False, internal: bool = False, polled: bool = False) -> typing.Any"),
           "Start a function on a peer and return the future of its value.\n\n"
           "`polled`: this thread will soon wait for the future, so no other thread is woken for the reply at once.")
      .def("create", &Client::create, "to"_a, "function"_a.none(), "args"_a.none(), "kwargs"_a.none(), "timeout"_a,
           "local_id"_a, "creation"_a, "receiver"_a = nb::none(),
           "Start a function on a peer, which keeps the result.\n\n"
           "The result is this worker's reference with the id `local_id`. A pool thread, or a thread that makes a\n"
           "call, later calls `creation` with the completion. Its `_call` is set once the request is under way, even\n"
           "if a signal handler raises meanwhile.")
      .def("call_request", &Client::call_request, "request"_a,
           "Send a request that Python has encoded and wait for its value, like `call`.")
      .def("start_request", &Client::start_request, "request"_a, "target"_a,
           "Send a request that Python has encoded.\n\n"
           "`target` is a future, or is called with the completion.")
      .def("wait", &Client::wait, "future"_a, "call"_a, "timeout"_a,
           "Wait for the completion of a call and complete its future.\n\n"
           "Returns False if the completion went to the pool. If it raises, for a signal handler, call it again.")
      .def("cancel", &Client::cancel, "call"_a,
           "Cancel a started call and complete its future.\n\n"
           "If another thread waits for the call, that thread completes the future. "
           "Returns False if the call has ended or its deadline has passed.")
      .def("expire", &Client::expire, "call"_a,
           "End a pending call soon, as if its deadline had just passed.\n\n"
           "Its error says how far the call had come.")
      .def("send_gradients", &Client::send_gradients, "peer"_a, "messages"_a, "timeout"_a, "target"_a,
           "encoded"_a = nb::none(),
           "Send messages of a backward pass and return the call's id.\n\n"
           "`encoded`: the messages as an `Encoded`, if Python has encoded them.\n"
           "The completion goes to `await_gradients`, or to `target`, which the pool calls if no thread waits.\n"
           "Returns 0 if the engine has been stopped, NOT_ENCODABLE if nothing has been sent.")
      .def("await_gradients", &Client::await_gradients, "call"_a, "timeout"_a,
           "Wait for the reply, like `wait`.\n\n"
           "Returns messages, an `OtherReply`, or None if the completion went to the pool.")
      .def("complete_many", &Client::complete_many, "futures"_a, "calls"_a, "results"_a, "notify_when_done"_a,
           "Wait for started calls and complete their futures in this thread.\n\n"
           "A value that the codec decodes is also stored in `results`. If another thread is processing the\n"
           "completion of a future, notify_when_done(future) is called, which has to cause a call of\n"
           "`notify_wait_sets`. Returns the first future that failed; None if none did, though other threads may\n"
           "still process some; False, without waiting, if another thread waits for one of them. Raises the\n"
           "exception of a signal handler.")
      .def("read_scope", &Client::read_scope, "timeout"_a,
           nb::sig("def read_scope(self, timeout: int) -> tuple[typing.Any, int, int]"),
           "Return autograd context, timeout within the scope, and depth of a call.")
      .def("notify_wait_sets", &Client::notify_wait_sets,
           "Notify threads in `complete_many` that another thread has completed a future.")
      .def("notify_context_ended", &Client::notify_context_ended, "peer"_a, "value"_a, "epoch"_a = kAnyEpoch,
           "Notify a peer that an autograd context has ended.\n\n"
           "It is not sent if its epoch has ended. Returns False if the codec cannot encode the value.")
      .def_ro_static("NOT_ENCODABLE", &kNotEncodable);
}

}  // namespace telegrad::python
