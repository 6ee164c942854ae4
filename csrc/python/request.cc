#include "python/request.h"

#include <algorithm>
#include <optional>

#include "python/block.h"
#include "python/buffer_leases.h"
#include "python/calls.h"
#include "python/completion.h"
#include "python/context_manager.h"
#include "python/errors.h"
#include "python/wire.h"

namespace telegrad::python {
namespace {

nb::object or_none(const nb::object& o) { return o.is_valid() ? o : nb::none(); }

/// Calls a Python function of the slow path.
template <class... Args>
nb::object ask(nb::handle function, const Args&... args) {
  return in_python([&] { return nb::object(function(args...)); });
}

}  // namespace

RequestServer::RequestServer(Engine& engine, const codec::Codec& codec, const AutogradHooks& autograd,
                             const ServerCallbacks& python, const ScopeSetter& scopes)
    : engine_(engine),
      codec_(codec),
      autograd_(autograd),
      python_(python),
      scopes_(scopes),
      async_mark_(interned("_wrapped_async_rpc_function")),
      ready_name_(interned("ready")),
      error_name_(interned("error")),
      value_name_(interned("value")) {}

void RequestServer::serve(Request& arrived) {
  Request* r = &arrived;
  nb::object holder;  // owner of the request once Python may keep it
  nb::object result;
  std::unique_ptr<Outgoing> reply;
  nb::object recorded = nb::none();  // the number of the reply, if its tensors are recorded
  bool sent = false;
  enum { kParked, kValue, kDeferred } kind = kValue;
  bool ran = true;  // whether code of the program ran
  const nb::object error = error_of([&] {
    nb::object value;
    if (r->decoded) {
      enter(*r);
    } else if (!decode(r, holder)) {
      kind = kParked;
      return;
    }
    if (r->receiver.is_valid() && !find_receiver(r, holder, value)) {
      kind = kParked;
      return;
    }
    if (r->function.is_valid()) {
      result = run(*r);
      if (is_deferred(r->function, result)) {
        kind = kDeferred;
        return;
      }
    } else {
      result = std::move(value);
      ran = r->slow.is_valid();
    }
    if (r->slow.is_valid()) {
      ask(r->slow.attr("leave_state"));
      if (nb::cast<bool>(r->slow.attr("has_slow_reply"))) return;
    }
    if (r->target.is_valid()) {
      call_back(python_.set_result, r->target, result);
      const nb::object target = nb::make_tuple(r->target[0], r->target[1]);
      reply = encode_basic(codec_, wire::kCreated, wire::kMustDeliver, target);
    } else if (r->slow.is_valid() && nb::cast<bool>(r->slow.attr("has_state"))) {
      reply = nullptr;  // the caller's state decides what Python records
    } else {
      reply = encode_value(*r, result, recorded);
    }
  });
  if (kind == kParked && !error.is_valid()) {
    scopes_.clear();
    return;
  }
  const nb::object failures[] = {
      error_of([&] {
        if (error.is_valid()) return reply_error(*r, error);
        if (!reply) return reply_slow(*r, std::move(result), kind == kDeferred);
        // Leave the message as the only holder of the result: see hand_off_leases and record_versions.
        if (!reply->segments.empty() && (any_leases() || reply->payload_size() > kMaxCopied)) {
          result = {};
          r->args = {};
          r->kwargs = {};
        }
        sent = send_reply(engine_, r->item.connection, r->call(), std::move(reply));
      }),
      error_of([&] {
        if (!sent && !recorded.is_none()) autograd_.rollback(r->context, recorded, r->item.peer);
      }),
      error_of([&] {
        if (r->slow.is_valid()) ask(r->slow.attr("leave"));
      }),
      error_of([&] {
        if (ran) call_back(python_.clean_state);
      }),
  };
  for (const nb::object& failure : failures) {
    if (failure.is_valid()) rethrow(failure);
  }
}

void RequestServer::resume(Request& r) {
  const bool cancelable = !(r.flags() & wire::kMustRun);
  const bool canceled = engine_.detach(r.item.connection, r.call(), true);
  if (canceled || (cancelable && now() >= r.item.deadline)) {
    call_back(python_.reply_canceled, info_of(r), nb::bool_(canceled));
  } else {
    serve(r);
  }
}

std::unique_ptr<Outgoing> RequestServer::encode_value(const Request& r, const nb::object& value,
                                                      nb::object& message) const {
  codec::Encoded encoded;
  const bool encodable =
      r.context.is_none() ? is_encoded(codec_.encode_basic(value.ptr(), encoded))
                          : autograd_.encode(codec_, value, r.item.peer, r.context, false, kAnyEpoch, encoded, message);
  if (!encodable) return nullptr;
  encoded.versioned = encoded.needs_versions() && engine_.is_resumable(r.item.connection);
  // A caller that has stopped waiting still has to release what is recorded in a plain context.
  auto reply = compose(wire::kValue, message.is_none() ? 0 : wire::kMustDeliver, encoded);
  if (!message.is_none()) add_metadata(*reply, codec_, nb::none(), id_of(r.context), message);
  return reply;
}

void RequestServer::reply_slow(Request& r, nb::object result, bool deferred) {
  const nb::object error = error_of([&] {
    const nb::object info = info_of(r);
    if (deferred) {
      call_back(python_.reply_when_done, info, or_none(r.slow), result, r.function);
      return;
    }
    nb::list only;  // `reply` empties it, so that the message is the only holder of the result
    only.append(result);
    result = {};
    r.args = {};
    r.kwargs = {};
    call_back(python_.reply, info, only);
  });
  if (error.is_valid()) reply_error(r, error);
}

void RequestServer::reply_error(Request& r, const nb::object& error) {
  call_back(python_.reply_error, info_of(r), error);
}

nb::object RequestServer::info_of(const Request& r) const {
  if (r.slow.is_valid()) return r.slow.attr("info");
  return python_.info_type(r.item.peer, r.item.connection, r.call(), r.deadline(), or_none(r.target), r.context);
}

bool RequestServer::decode(Request*& r, nb::object& holder) {
  Incoming& m = r->item.message;
  ContextTag in;
  nb::object wrap;
  const bool slow = r->slow.is_valid();  // resumed after its references were confirmed
  if (!slow && !records_all_ && m.header.tag == wire::kCall && is_simple(*r, in)) {
    if (in.id.is_valid()) {
      r->context = autograd_.on_request(in, r->item.peer, r->item.connection);
      wrap = autograd_.wrap(in, r->item.peer, r->context);
    }
    if (m.header.flags & wire::kMetadata) m.segments.pop_back();
    enter(*r);
    read_body(*r, decode_body(codec_, m, wrap));
  } else {
    if (!slow) {
      const nb::object body = body_object(std::move(m.body)), segments = segment_list(std::move(m.segments));
      nb::object prepared = ask(python_.prepare, info_of(*r), m.header.tag, m.header.flags, body, segments);
      if (prepared.is_none()) return false;
      r->context = prepared.attr("context");
      const nb::object target = prepared.attr("target");
      if (!target.is_none()) r->target = target;
      r->slow = std::move(prepared);
      if (nb::cast<bool>(r->slow.attr("has_references")) && park(r, holder)) return false;
    }
    enter(*r);
    admit(*r);  // before anything is unpickled
    read_body(*r, ask(r->slow.attr("decode")));
  }
  r->decoded = true;
  return true;
}

void RequestServer::admit(const Request& r) const {
  if (python_.admit.is_none()) return;
  if (!r.item.name) {
    if (!(r.flags() & wire::kReceiver)) call_back(python_.admit, nb::none());
    return;
  }
  NameHandle& handle = handle_of(*r.item.name);
  if (handle.is_admitted) return;
  call_back(python_.admit, nb::borrow(handle.text.front()));
  handle.is_admitted = true;
}

void RequestServer::enter(const Request& r) const {
  scopes_.enter_request(r.deadline(), r.context, r.item.connection, r.call(),
                        std::min(r.item.message.header.depth, UINT32_MAX - 1) + 1);
  if (r.slow.is_valid()) ask(r.slow.attr("enter"));
}

bool RequestServer::is_simple(const Request& r, ContextTag& in) const {
  const int slow = r.flags() & wire::kSlowRequest;
  if (slow == 0) return true;
  if (slow != wire::kMetadata) return false;
  try {
    return autograd_.is_unguarded() && AutogradHooks::read(codec_, r.item.message, in);
  } catch (nb::python_error&) {
    return false;  // the slow path raises the error
  }
}

void RequestServer::read_body(Request& r, const nb::object& body) {
  const bool keeps = r.flags() & wire::kKeepAs, has_receiver = r.flags() & wire::kReceiver;
  const bool by_value = !r.item.name && !has_receiver;
  Py_ssize_t left = PyTuple_Check(body.ptr()) ? PyTuple_GET_SIZE(body.ptr()) : -1;
  if (left != 2 + keeps + has_receiver + by_value) {
    PyErr_SetString(codec::codec_error(), "a request to run a function has no arguments");
    throw nb::python_error();
  }
  const auto last = [&] { return nb::borrow(PyTuple_GET_ITEM(body.ptr(), --left)); };
  if (has_receiver) r.receiver = last();
  if (keeps) {
    const nb::object local_id = last();
    if (!r.target.is_valid()) {
      r.target = ask(python_.accept, r.item.peer, local_id, r.item.connection);
      if (r.slow.is_valid()) ask(r.slow.attr("set_target"), r.target);
    }
  }
  if (!r.slow.is_valid()) admit(r);  // after the reference to create, which gets the error
  r.kwargs = last();
  r.args = last();
  if (by_value) {
    r.function = last();
  } else if (!has_receiver) {
    r.function = function_of(*r.item.name);
  }
  if (!PyTuple_CheckExact(r.args.ptr())) r.args = python_result(PySequence_Tuple(r.args.ptr()));
  if (!PyDict_CheckExact(r.kwargs.ptr())) {
    PyErr_Format(PyExc_TypeError, "keyword arguments must be a dict, not %R", r.kwargs.type().ptr());
    throw nb::python_error();
  }
}

bool RequestServer::find_receiver(Request*& r, nb::object& holder, nb::object& value) {
  value = value_here(r->receiver);
  if (!value.is_valid()) {
    if (r->slow.is_valid()) ask(r->slow.attr("leave"));
    if (park(r, holder)) return false;
    if (r->slow.is_valid()) ask(r->slow.attr("enter"));
    value = ask(python_.value_of, r->receiver);
  }
  if (!r->item.name) return true;
  const nb::object function = function_of(*r->item.name);
  if (PyUnicode_CheckExact(function.ptr())) {
    nb::object method;
    if (python_.admit.is_none()) {
      method = nb::steal(in_python([&] { return PyObject_GetAttr(value.ptr(), function.ptr()); }));
    }
    if (!method.is_valid() || !PyCallable_Check(method.ptr())) {
      PyErr_Clear();
      method = ask(python_.method_of, value, function);  // checks it, or raises the error
    }
    r->function = std::move(method);
  } else {
    r->function = function;
    const nb::object first = nb::make_tuple(value);
    r->args = python_result(PySequence_Concat(first.ptr(), r->args.ptr()));
  }
  return true;
}

bool RequestServer::park(Request*& r, nb::object& holder) {
  if (!holder.is_valid()) {
    holder = nb::cast(std::move(*r), nb::rv_policy::move);
    r = nb::inst_ptr<Request>(holder);
  }
  const nb::object receiver = r->decoded ? r->receiver : nb::none();
  engine_.park(r->item);  // before another thread can resume it
  const bool parked =
      nb::cast<bool>(ask(python_.park, holder, or_none(r->slow), receiver, !r->item.name, r->item.peer));
  if (!parked) engine_.detach(r->item.connection, r->call(), true);
  return parked;
}

nb::object RequestServer::value_here(const nb::object& receiver) const {
  PyObject* entry = PyDict_GetItemWithError(python_.values.ptr(), receiver.ptr());
  if (!entry) {
    PyErr_Clear();  // malformed numbers cannot be hashed
    return {};
  }
  const nb::object kept = nb::borrow(entry);
  if (!kept.attr(ready_name_).is(nb::bool_(true)) || !kept.attr(error_name_).is_none()) return {};
  return kept.attr(value_name_);
}

nb::object RequestServer::function_of(const Name& name) const {
  NameHandle& handle = handle_of(name);
  if (handle.resolver.empty()) {
    const nb::object resolver = nb::steal(call_python(python_.resolver.ptr(), handle.text.front()));
    if (resolver.is_valid() && handle.resolver.empty()) handle.resolver.add(resolver);
  }
  nb::object found;
  if (!handle.resolver.empty()) found = nb::steal(call_python(handle.resolver.front()));
  if (found.is_valid()) return found;
  PyErr_Clear();
  return python_result(call_python(python_.find_function.ptr(), handle.text.front()));
}

nb::object RequestServer::run(Request& r) {
  if (r.slow.is_valid() && nb::cast<bool>(r.slow.attr("is_intercepted"))) {
    r.function = ask(r.slow.attr("intercept"), r.function);
  }
  const nb::object recording = r.slow.is_valid() ? nb::object(r.slow.attr("recording")) : nb::none();
  std::optional<ContextManager> recorded;
  if (!recording.is_none()) recorded.emplace(recording);
  PyObject* named = PyDict_GET_SIZE(r.kwargs.ptr()) == 0 ? nullptr : r.kwargs.ptr();
  nb::object result = nb::steal(in_python([&] { return PyObject_Call(r.function.ptr(), r.args.ptr(), named); }));
  if (result.is_valid()) return result;
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
  const nb::object error = take_error();  // a torch operator reports which arguments are wrong
  const nb::object rerun = ask(python_.rerun_for_torch_error, r.function, r.args, r.kwargs, error);
  if (nb::object(rerun[1]).is_none()) return rerun[0];
  rethrow(error);
}

bool RequestServer::is_deferred(const nb::object& function, const nb::object& result) const {
  return PyCoro_CheckExact(result.ptr()) ||
         in_python([&] { return PyObject_HasAttr(function.ptr(), async_mark_.ptr()); });
}

}  // namespace telegrad::python
