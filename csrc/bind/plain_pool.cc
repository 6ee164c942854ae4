// The called side of the short way, and where replies to asynchronous calls arrive: what a thread of the pool does.
#include <nanobind/stl/optional.h>

#include <optional>
#include <utility>

#include "bind/calls.h"
#include "bind/errors.h"
#include "bind/loans.h"
#include "bind/plain.h"
#include "bind/recorded.h"
#include "bind/scopes.h"
#include "codec/gil.h"

using namespace nanobind::literals;

namespace telegrad::bind {
namespace {

constexpr int kAtATime = 16;  // items done here before Python may let another thread have the GIL
constexpr std::size_t kMostEnded = 64;
constexpr Nanos kEndDelay = 5 * kMillisecond;  // that contexts which have ended wait for a moment of leisure
constexpr int kAgain = 5;                      // "nothing for you; come again"

struct Hooks {
  nb::object engine, codec;
  nb::object resolver;  // resolver(name) -> function() -> the function
  nb::object clean_state;
  nb::object make;       // make(peer, connection, call, deadline, local id, function, args, kwargs) -> to be answered?
  nb::object answer;     // answer(peer, connection, call, deadline, function, args, kwargs, [result], error, context)
  nb::object complete;   // complete(future, value)
  nb::object fail;       // fail(future, error)
  nb::object gradients;  // gradients(peer, connection, call, deadline, messages)
  nb::object ended;      // ended(peer, (context id, requests))
  nb::object fetch;      // the function that is called with a reference's two numbers, for its value,
  nb::object values;     // and a dict of such values, see telegrad.worker.owned
};

class PlainPool {
 public:
  PlainPool(Hooks hooks, Scopes scopes, const nb::object& recorder, Words words)
      : hooks_(std::move(hooks)),
        scopes_(std::move(scopes)),
        engine_(nb::cast<Engine&>(hooks_.engine)),
        codec_(nb::cast<codec::Codec&>(hooks_.codec)),
        recorder_(recorder),
        words_(words),
        async_mark_(interned("_wrapped_async_rpc_function")),
        ready_(interned("ready")),
        error_(interned("error")),
        value_(interned("value")) {}

  std::optional<nb::tuple> next(PoolThread& self) {
    Scoped scoped(*this);
    for (int done = 0; done < kAtATime; ++done) {
      Item item;
      if (!next_item(engine_, self, item, [&scoped] { scoped.leave(); })) return std::nullopt;
      if (item.kind == ItemKind::kRequest) scoped.undo_callbacks();
      if (item.spawn || !take(item, scoped)) {
        scoped.leave();
        end_contexts();
        const bool spawn = item.spawn;
        try {
          return item_tuple(std::move(item));
        } catch (const std::exception&) {  // no memory: the request for one more thread is lost
          if (spawn) engine_.not_spawned();
          throw;
        }
      }
    }
    return nb::make_tuple(kAgain, false);
  }

  bool reply(std::uint64_t connection, std::uint64_t call, nb::handle messages) {
    auto m = encode_plain(codec_, words_.gradients, 0, messages);
    if (!m) return false;
    send_reply(engine_, connection, call, std::move(m));
    return true;
  }

  /// From now on requests may run, or may not.
  void open(bool open) { open_ = open; }

  int traverse(visitproc visit, void* arg) const {
    for (const nb::object* o :
         {&hooks_.engine, &hooks_.codec, &hooks_.resolver, &hooks_.clean_state, &hooks_.make, &hooks_.answer,
          &hooks_.complete, &hooks_.fail, &hooks_.gradients, &hooks_.ended, &hooks_.fetch, &hooks_.values}) {
      Py_VISIT(o->ptr());
    }
    if (const int visited = scopes_.traverse(visit, arg)) return visited;
    return recorder_.traverse(visit, arg);
  }
  /// No thread is in `next` any more, nor will be: each holds this object.
  void clear() {
    const Hooks gone = std::move(hooks_);
    const auto told = std::move(ended_);
    const Scopes no_more = std::exchange(scopes_, {});
    hooks_ = {};
    ended_.clear();
    recorder_.clear();
  }

 private:
  /// What this thread's context says runs here, and torch's state that callbacks have left in the thread; both are
  /// clean when Python has it back.
  class Scoped {
   public:
    explicit Scoped(PlainPool& pool) : pool_(pool) {}
    Scoped(const Scoped&) = delete;
    Scoped& operator=(const Scoped&) = delete;
    ~Scoped() { leave(); }

    void leave() {
      undo_callbacks();
      pool_.scopes_.clear();
    }
    void callbacks_have_run() { callbacks_ = true; }
    /// Once for all that ran in a row, since nearly none leaves anything.
    void undo_callbacks() {
      if (!std::exchange(callbacks_, false)) return;
      if (PyObject* done = call_python(pool_.hooks_.clean_state.ptr())) {
        Py_DECREF(done);
      } else {
        PyErr_WriteUnraisable(pool_.hooks_.clean_state.ptr());
      }
    }

   private:
    PlainPool& pool_;
    bool callbacks_ = false;
  };

  /// The function of a name, as it stands now; not valid if that takes more than a look: then Python finds out.
  nb::object function_of(const Name& name) const {
    NameHandle& handle = handle_of(name);
    nb::object found;
    if (handle.resolver.empty()) {
      const nb::object resolver = nb::steal(call_python(hooks_.resolver.ptr(), handle.text.front()));
      if (resolver.is_valid() && handle.resolver.empty()) handle.resolver.add(resolver);
    }
    if (!handle.resolver.empty()) found = nb::steal(call_python(handle.resolver.front()));
    if (!found.is_valid()) PyErr_Clear();
    return found;
  }

  /// Does what is plain. False: nothing has been done.
  bool take(Item& item, Scoped& scoped) {
    if (item.kind == ItemKind::kRequest) return run(item);
    if (item.kind == ItemKind::kOneway) return told(item);
    return finish(item, scoped);
  }

  /// A peer says that a context has ended. To end it here takes a while, and another request may be right behind: so it
  /// is done after the answer to that, when this worker has nothing to do, or when the engine's nudge comes.
  bool told(Item& item) {
    const FrameHeader& h = item.message.header;
    if (!open_ || h.tag != words_.ended || h.flags & words_.request_flags) return false;
    nb::object what;
    try {
      what = decode_plain(codec_, item.message);
    } catch (nb::python_error&) {
      return false;  // Python says what is wrong with it
    }
    if (!PyTuple_CheckExact(what.ptr()) || PyTuple_GET_SIZE(what.ptr()) != 2) return false;
    ended_.emplace_back(item.peer, std::move(what));
    if (ended_.size() < kMostEnded) {
      engine_.nudge(kEndDelay);
    } else {
      end_contexts();
    }
    return true;
  }

  void end_contexts() {
    if (ended_.empty()) return;
    scopes_.clear();
    for (const auto& [peer, what] : std::exchange(ended_, {})) {
      const nb::object done = nb::steal(call_python(hooks_.ended.ptr(), nb::int_(peer).ptr(), what.ptr()));
      if (!done.is_valid()) PyErr_WriteUnraisable(hooks_.ended.ptr());
    }
  }

  /// Hands on messages of a backward pass, which will be answered with `reply`.
  bool gradients(Item& item) {
    const nb::int_ peer(item.peer), connection(item.connection), id(item.message.header.call_id);
    const nb::int_ deadline(item.deadline == kNever ? 0 : item.deadline);
    scopes_.clear();
    try {
      call(hooks_.gradients, peer, connection, id, deadline, decode_plain(codec_, item.message));
      call(hooks_.clean_state);
    } catch (nb::python_error& e) {
      e.restore();
      nb::list nothing;
      nothing.append(nb::none());
      const nb::object error = take_error();
      call(hooks_.answer, peer, connection, id, deadline, nb::none(), nb::none(), nb::none(), nothing, error,
           nb::none());
    }
    end_contexts();
    return true;
  }

  /// Runs a request and answers it. False: it is not plain, and nothing has been done.
  bool run(Item& item) {
    const FrameHeader& h = item.message.header;
    const int unusual = h.flags & words_.request_flags;
    if (open_ && h.tag == words_.gradients && !unusual) return gradients(item);
    if (!open_ || !item.name) return false;
    if (!unusual) end_contexts();
    if (h.tag == words_.make && (!unusual || unusual == words_.preamble)) return make(item);
    if (h.tag != words_.call || (unusual && unusual != words_.preamble)) return false;
    InContext in;
    if (unusual && !is_recorded(item.message, in)) return false;
    const nb::object function = function_of(*item.name);
    if (!function.is_valid()) return false;
    const Nanos deadline = item.deadline == kNever ? 0 : item.deadline;

    nb::object context = nb::none(), wrap, args, kwargs, result;
    std::unique_ptr<Outgoing> reply;
    bool fetched = false;  // no code of the program has run
    const nb::object error = error_of([&] {
      if (unusual) {
        context = recorder_.arrived(in, item.peer);
        wrap = recorder_.wrap(in, item.peer, context);
        item.message.segments.pop_back();
      }
      if (!unusual && function.is(hooks_.fetch)) {
        read_arguments(item, wrap, args, kwargs);
        if (PyDict_GET_SIZE(kwargs.ptr()) == 0) result = value_here(args);
        fetched = result.is_valid();
      }
      if (!fetched) {
        scopes_.enter_request(deadline, context, item.connection);
        if (!args.is_valid()) read_arguments(item, wrap, args, kwargs);
        PyObject* named = PyDict_GET_SIZE(kwargs.ptr()) == 0 ? nullptr : kwargs.ptr();
        result = nb::steal(in_python([&] { return PyObject_Call(function.ptr(), args.ptr(), named); }));
        if (!result.is_valid()) throw nb::python_error();
      }
      if (fetched || !comes_later(function, result)) {
        reply = context.is_none()
                    ? encode_plain(codec_, words_.value, 0, result)
                    : recorder_.encode(codec_, words_, words_.value, 0, result, item.peer, context, false);
      }
    });
    if (reply) {
      if (!reply->segments.empty() && any_loans()) {  // the message alone has what it returned
        result = {};
        args = {};
        kwargs = {};
      }
      send_reply(engine_, item.connection, h.call_id, std::move(reply));
      if (!fetched) call(hooks_.clean_state);
      if (unusual) end_contexts();
    } else {
      nb::list made;  // see Handlers._settle_made
      made.append(or_none(result));
      result = {};
      call(hooks_.answer, nb::int_(item.peer), nb::int_(item.connection), nb::int_(h.call_id), nb::int_(deadline),
           function, or_none(args), or_none(kwargs), made, or_none(error), context);
    }
    return true;
  }

  /// Runs a request whose result stays here, and says so.
  bool make(Item& item) {
    const nb::object function = function_of(*item.name);
    if (!function.is_valid()) return false;
    if (item.message.header.flags & words_.preamble && !item.message.segments.empty()) {
      item.message.segments.pop_back();  // the body says the same
    }
    const nb::int_ peer(item.peer), connection(item.connection), id(item.message.header.call_id);
    const nb::int_ deadline(item.deadline == kNever ? 0 : item.deadline);
    const nb::object error = error_of([&] {
      const nb::object parts = decode_plain(codec_, item.message);
      if (!PyTuple_CheckExact(parts.ptr()) || PyTuple_GET_SIZE(parts.ptr()) != 3) {
        PyErr_SetString(codec::codec_error(), "a request to make a value has no arguments");
        throw nb::python_error();
      }
      const nb::handle args = PyTuple_GET_ITEM(parts.ptr(), 0), kwargs = PyTuple_GET_ITEM(parts.ptr(), 1),
                       local_id = PyTuple_GET_ITEM(parts.ptr(), 2);
      scopes_.enter_request(item.deadline == kNever ? 0 : item.deadline, nb::none(), item.connection);
      const nb::object made =
          nb::steal(call_python(hooks_.make.ptr(), peer.ptr(), connection.ptr(), id.ptr(), deadline.ptr(),
                                local_id.ptr(), function.ptr(), args.ptr(), kwargs.ptr()));
      if (!made.is_valid()) throw nb::python_error();
      if (made.ptr() == Py_True) {
        const nb::object target = nb::steal(PyTuple_Pack(2, peer.ptr(), local_id.ptr()));
        if (!target.is_valid()) throw nb::python_error();
        send_reply(engine_, item.connection, item.message.header.call_id,
                   encode_plain(codec_, words_.created, words_.may_linger, target));
      }
      call(hooks_.clean_state);
    });
    if (!error.is_valid()) return true;
    nb::list nothing;
    nothing.append(nb::none());
    call(hooks_.answer, peer, connection, id, deadline, function, nb::none(), nb::none(), nothing, error, nb::none());
    return true;
  }

  /// The value that a reference's two numbers stand for, if it is there; else not valid, and Python looks.
  nb::object value_here(const nb::object& rref) const {
    PyObject* owned = PyDict_GetItemWithError(hooks_.values.ptr(), rref.ptr());
    if (!owned) {
      PyErr_Clear();  // such numbers cannot be hashed
      return {};
    }
    const nb::object kept = nb::borrow(owned);
    if (!kept.attr(ready_).is(nb::bool_(true)) || !kept.attr(error_).is_none()) return {};
    return kept.attr(value_);
  }

  void read_arguments(Item& item, const nb::object& wrap, nb::object& args, nb::object& kwargs) {
    const nb::object both = decode_plain(codec_, item.message, wrap);
    if (!PyTuple_CheckExact(both.ptr()) || PyTuple_GET_SIZE(both.ptr()) != 2) {
      PyErr_SetString(codec::codec_error(), "a request to run a function has no arguments");
      throw nb::python_error();
    }
    args = nb::borrow(PyTuple_GET_ITEM(both.ptr(), 0));
    kwargs = nb::borrow(PyTuple_GET_ITEM(both.ptr(), 1));
    if (!PyTuple_CheckExact(args.ptr())) {
      args = nb::steal(PySequence_Tuple(args.ptr()));
      if (!args.is_valid()) throw nb::python_error();
    }
    if (!PyDict_CheckExact(kwargs.ptr())) {
      PyErr_Format(PyExc_TypeError, "keyword arguments must be a dict, not %R", kwargs.type().ptr());
      throw nb::python_error();
    }
  }

  /// Is this preamble of a request one that is run here? Python says what is wrong with one that cannot be read.
  bool is_recorded(const Incoming& message, InContext& in) const {
    try {
      return recorder_.runs() && Recorder::read(codec_, message, in);
    } catch (nb::python_error&) {
      return false;
    }
  }

  bool comes_later(const nb::object& function, const nb::object& result) const {
    return PyCoro_CheckExact(result.ptr()) ||
           in_python([&] { return PyObject_HasAttr(function.ptr(), async_mark_.ptr()); });
  }

  /// Completes the future of a call that has returned a plain value. False: it has not, or something else is to be
  /// done.
  bool finish(Item& item, Scoped& scoped) {
    if (item.kind != ItemKind::kOutcome || !item.cookie || !is_plain_value(words_, item.outcome)) return false;
    scopes_.enter_callbacks();
    scoped.callbacks_have_run();
    auto& cookie = static_cast<References&>(*item.cookie);
    const nb::object future = nb::borrow(cookie.front());
    cookie.release();
    const nb::object error = error_of([&] { call(hooks_.complete, future, decode_plain(codec_, item.outcome.reply)); });
    if (error.is_valid()) call(hooks_.fail, future, error);
    return true;
  }

  static nb::object or_none(const nb::object& o) { return o.is_valid() ? o : nb::none(); }

  template <class... Args>
  static void call(const nb::object& function, const Args&... args) {
    const nb::object result = nb::steal(call_python(function.ptr(), args.ptr()...));
    if (!result.is_valid()) throw nb::python_error();
  }

  Hooks hooks_;
  Scopes scopes_;
  Engine& engine_;
  codec::Codec& codec_;
  Recorder recorder_;
  const Words words_;
  const nb::object async_mark_, ready_, error_, value_;     // names of attributes
  std::vector<std::pair<std::int32_t, nb::object>> ended_;  // contexts, as peers have told, to be ended here soon
  bool open_ = false;
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<PlainPool>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<PlainPool>(self)->clear();
  return 0;
}

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};

}  // namespace

void init_plain_pool(nb::module_& m) {
  nb::class_<PlainPool>(
      m, "PlainPool", nb::type_slots(slots),
      "What threads of the pool wait on. Does by itself what is plain: requests to run a function on\n"
      "plain values, and replies with a plain value to asynchronous calls.")
      .def(
          "__init__",
          [](PlainPool* self, nb::object engine, nb::object codec, nb::object recorder, int call, int value, int make,
             int created, int gradients, int ended, int may_linger, int request_flags, int reply_flags, int preamble,
             nb::object worker, nb::object scope_type, nb::object current, nb::object callback_scope,
             nb::object resolver, nb::object clean_state, nb::object make_value, nb::object answer, nb::object complete,
             nb::object fail, nb::object on_gradients, nb::object on_ended, nb::object fetch, nb::dict values) {
            new (self) PlainPool(
                Hooks{std::move(engine), std::move(codec), std::move(resolver), std::move(clean_state),
                      std::move(make_value), std::move(answer), std::move(complete), std::move(fail),
                      std::move(on_gradients), std::move(on_ended), std::move(fetch), std::move(values)},
                Scopes(std::move(worker), std::move(scope_type), std::move(current), std::move(callback_scope)),
                recorder,
                Words{.call = call,
                      .value = value,
                      .make = make,
                      .created = created,
                      .may_linger = may_linger,
                      .request_flags = request_flags,
                      .reply_flags = reply_flags,
                      .gradients = gradients,
                      .ended = ended,
                      .preamble = preamble});
          },
          nb::kw_only(), "engine"_a, "codec"_a, "recorder"_a, "call"_a, "value"_a, "make"_a, "created"_a, "gradients"_a,
          "ended"_a, "may_linger"_a, "request_flags"_a, "reply_flags"_a, "preamble"_a, "worker"_a, "scope_type"_a,
          "current"_a, "callback_scope"_a, "resolver"_a, "clean_state"_a, "make_value"_a, "answer"_a, "complete"_a,
          "fail"_a, "on_gradients"_a, "on_ended"_a, "fetch"_a, "values"_a)
      .def("reply", &PlainPool::reply, "connection"_a, "call"_a, "messages"_a,
           "Answers messages of a backward pass with others. False: they are not plain, and nothing has been sent.")
      .def(
          "open", [](PlainPool& self) { self.open(true); },
          "From now on requests may run here; until then all go to Python.")
      .def(
          "close", [](PlainPool& self) { self.open(false); }, "From now on all requests go to Python.")
      .def("next", &PlainPool::next, "thread"_a,
           "As `Engine.next`, but only what is not plain; (5 nothing, spawn) means: come again.\n\n"
           "What it raises is an error of Telegrad's own.");
}

}  // namespace telegrad::bind
