#include "python/server.h"

#include <nanobind/stl/optional.h>

#include <optional>
#include <utility>
#include <vector>

#include "codec/gil.h"
#include "python/block.h"
#include "python/buffer_leases.h"
#include "python/calls.h"
#include "python/completion.h"
#include "python/context_manager.h"
#include "python/errors.h"
#include "python/metadata.h"
#include "python/request.h"
#include "python/scope_setter.h"
#include "python/wire.h"

using namespace nanobind::literals;

namespace telegrad::python {
namespace {

constexpr int kAtATime = 16;  // work items before returning to Python, which may then switch threads
constexpr std::size_t kMostEnded = 64;
constexpr Nanos kEndDelay = 5 * kMillisecond;  // longest time until an ended context is cleaned up

/// Report of a peer that a context has ended.
struct EndedContext {
  std::int32_t peer;
  std::uint64_t connection;
  nb::object what;  // (context id, requests)
};

class Server {
 public:
  Server(nb::object engine, nb::object codec, const nb::object& hooks, const nb::object& calls,
         const nb::object& handlers, const nb::object& environment, ScopeSetter scopes)
      : engine_object_(std::move(engine)),
        codec_object_(std::move(codec)),
        engine_(nb::cast<Engine&>(engine_object_)),
        codec_(nb::cast<codec::Codec&>(codec_object_)),
        autograd_(hooks),
        completions_(codec_, autograd_, calls, environment.attr("future_type")),
        python_(handlers, environment),
        scopes_(std::move(scopes)),
        requests_(engine_, codec_, autograd_, python_, scopes_) {}

  /// Serves work items. Returns one that Python has to process, or nothing when the engine has stopped.
  std::optional<nb::tuple> next(PoolThread& self, nb::handle start_another) {
    ScopeGuard scope(*this);
    for (int done = 0; done < kAtATime; ++done) {
      WorkItem item;
      if (!next_work_item(engine_, self, item, [&scope] { scope.leave(); })) return std::nullopt;
      if (std::exchange(item.needs_thread, false)) [[unlikely]] {
        scope.leave();
        python_result(call_python(start_another.ptr()));
      }
      if (item.kind == WorkKind::kVerify) [[unlikely]] {
        scope.leave();
        verify(engine_, item);
      } else if (item.kind == WorkKind::kRequest) {
        scope.undo_callbacks();
        receive(std::move(item));
      } else if (!(item.kind == WorkKind::kOneway ? on_context_ended(item) : complete(item, scope))) {
        scope.leave();
        end_contexts();
        return work_item_tuple(std::move(item));
      }
    }
    return nb::make_tuple(static_cast<int>(WorkKind::kNoWork), false);
  }

  /// Resumes a request that was parked.
  void resume(Request& request) {
    ScopeGuard scope(*this);
    requests_.resume(request);
  }

  bool reply(std::uint64_t connection, std::uint64_t call, nb::handle messages) {
    auto m = encode_basic(codec_, wire::kGradients, 0, messages);
    if (!m) return false;
    send_reply(engine_, connection, call, std::move(m));
    return true;
  }

  /// Makes Python prepare every request, for the profile of a server or for interceptors.
  void record_all(bool on) { requests_.record_all(on); }

  int traverse(visitproc visit, void* arg) const {
    for (const nb::object* o : {&engine_object_, &codec_object_}) Py_VISIT(o->ptr());
    if (const int visited = python_.traverse(visit, arg)) return visited;
    if (const int visited = scopes_.traverse(visit, arg)) return visited;
    if (const int visited = completions_.traverse(visit, arg)) return visited;
    return autograd_.traverse(visit, arg);
  }
  /// Breaks reference cycles. No thread is in `next`: each such thread holds this object.
  void clear() {
    const nb::object engine = std::move(engine_object_), codec = std::move(codec_object_);
    const ServerCallbacks gone = std::exchange(python_, {});
    const auto ended = std::exchange(ended_, {});
    const ScopeSetter no_more = std::exchange(scopes_, {});
    autograd_.clear();
    completions_.clear();
  }

 private:
  /// Guards the scope of this thread, and the torch state that callbacks left in it. Both are reset before the thread
  /// returns to Python.
  class ScopeGuard {
   public:
    explicit ScopeGuard(Server& server) : server_(server) {}
    ScopeGuard(const ScopeGuard&) = delete;
    ScopeGuard& operator=(const ScopeGuard&) = delete;
    ~ScopeGuard() { leave(); }

    void leave() {
      undo_callbacks();
      server_.scopes_.clear();
    }
    void callbacks_have_run() { callbacks_ = true; }
    /// Resets torch state once after consecutive callbacks, because few of them change it.
    void undo_callbacks() {
      if (std::exchange(callbacks_, false)) server_.clean_state();
    }

   private:
    Server& server_;
    bool callbacks_ = false;
  };

  // ---- requests

  void receive(WorkItem&& item) {
    Request request(std::move(item));
    const FrameHeader& h = request.item.message.header;
    if (!ready_) [[unlikely]] {  // a member may call before this worker knows all members
      const nb::object error = error_of([&] { call_back(python_.wait_ready); });
      if (error.is_valid()) return requests_.reply_error(request, error);
      ready_ = true;
    }
    const bool slow = h.flags & wire::kSlowRequest;
    if (!slow && h.tag == wire::kGradients) {
      gradients(request);
    } else {
      if (!slow) end_contexts();
      requests_.serve(request);
    }
    if (slow || h.tag == wire::kGradients) end_contexts();
  }

  // ---- messages of autograd

  /// Passes messages of a backward pass to Python, which replies with `reply`.
  void gradients(Request& r) {
    const WorkItem& item = r.item;
    scopes_.clear();
    const nb::object error = error_of([&] {
      call_back(python_.on_gradients, nb::int_(item.peer), nb::int_(item.connection), nb::int_(r.call()),
                nb::int_(r.deadline()), decode_body(codec_, r.item.message));
      call_back(python_.clean_state);
    });
    if (error.is_valid()) requests_.reply_error(r, error);
  }

  /// Queues the end of an autograd context that a peer has reported. Ending it takes a while and another request may
  /// follow at once, so it is ended after the next reply, when this worker is idle, or when the requested callback
  /// runs.
  bool on_context_ended(WorkItem& item) {
    const FrameHeader& h = item.message.header;
    if (h.tag != wire::kContextEnded || h.flags & wire::kSlowRequest) return false;
    nb::object what;
    try {
      what = decode_body(codec_, item.message);
    } catch (nb::python_error&) {
      return false;  // Python raises the error
    }
    if (!PyTuple_CheckExact(what.ptr()) || PyTuple_GET_SIZE(what.ptr()) != 2) return false;
    ended_.push_back({item.peer, item.connection, std::move(what)});
    if (ended_.size() < kMostEnded) {
      engine_.request_callback(kEndDelay);
    } else {
      end_contexts();
    }
    return true;
  }

  void end_contexts() {
    if (ended_.empty()) return;
    scopes_.clear();
    for (const auto& [peer, connection, what] : std::exchange(ended_, {})) {
      const nb::object done = nb::steal(
          call_python(python_.on_context_ended.ptr(), nb::int_(peer).ptr(), nb::int_(connection).ptr(), what.ptr()));
      if (!done.is_valid()) PyErr_WriteUnraisable(python_.on_context_ended.ptr());
    }
  }

  // ---- completions of asynchronous calls

  /// Completes an asynchronous call. Returns false if it has no target or the item is no completion.
  bool complete(WorkItem& item, ScopeGuard& scope) {
    if (item.kind != WorkKind::kCompletion || !item.target) return false;
    scopes_.enter_callbacks();
    scope.callbacks_have_run();
    auto& refs = static_cast<PyRefs&>(*item.target);
    const nb::object target = nb::borrow(refs.front());
    refs.release();
    completions_.complete(target, item.take_completion());
    return true;
  }

  // ---- Python

  void clean_state() {
    if (PyObject* done = call_python(python_.clean_state.ptr())) {
      Py_DECREF(done);
    } else {
      PyErr_WriteUnraisable(python_.clean_state.ptr());
    }
  }

  nb::object engine_object_, codec_object_;
  Engine& engine_;
  codec::Codec& codec_;
  AutogradHooks autograd_;
  Completions completions_;
  ServerCallbacks python_;
  ScopeSetter scopes_;
  RequestServer requests_;
  std::vector<EndedContext> ended_;  // to clean up
  bool ready_ = false;
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Server>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Server>(self)->clear();
  return 0;
}

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};

}  // namespace

void init_server(nb::module_& m) {
  nb::class_<Request>(m, "Request", "Parked request, for `Server.resume`.");

  nb::class_<Server>(m, "Server", nb::type_slots(slots),
                     "The serving side of a worker: serves requests, completes asynchronous calls.")
      .def(
          "__init__",
          [](Server* self, nb::object engine, nb::object codec, const nb::object& hooks, const nb::object& calls,
             const nb::object& handlers, const nb::object& environment, nb::object worker, nb::object scope_type,
             nb::object callback_scope) {
            nb::object current = environment.attr("current");
            new (self) Server(
                std::move(engine), std::move(codec), hooks, calls, handlers, environment,
                ScopeSetter(std::move(worker), std::move(scope_type), std::move(current), std::move(callback_scope)));
          },
          "engine"_a, "codec"_a, "hooks"_a, "calls"_a, "handlers"_a, "environment"_a, "worker"_a, "scope_type"_a,
          "callback_scope"_a)
      .def("record_all", &Server::record_all, "on"_a,
           "Have Python prepare every request, for profiles or interceptors.")
      .def("reply", &Server::reply, "connection"_a, "call"_a, "messages"_a,
           "Reply to messages of a backward pass with messages.\n\n"
           "Returns False if the codec cannot encode them.")
      .def("resume", &Server::resume, "request"_a, "Resume a request that was parked.")
      .def("next", &Server::next, "thread"_a, "start_another"_a,
           "Process work items until there is one for Python; return it like `Engine.next`.\n\n"
           "The kind NO_WORK means: call again. Calls start_another() when the pool needs one more thread. An\n"
           "exception is an internal error of Telegrad.");
}

}  // namespace telegrad::python
