#include "python/prepare.h"

#include <algorithm>
#include <utility>

#include "codec/gil.h"
#include "python/errors.h"
#include "python/field_tuple.h"
#include "python/wire.h"

namespace telegrad::python {
namespace {

/// Reports whether a function without arguments returns `what`. Throws nb::python_error.
bool returns(const nb::object& function, PyObject* what) {
  return python_result(PyObject_CallNoArgs(function.ptr())).ptr() == what;
}

/// Returns the value of a key, borrowed, or null. Throws nb::python_error.
PyObject* find(const nb::object& dict, nb::handle key) {
  PyObject* found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (!found && PyErr_Occurred()) throw nb::python_error();
  return found;
}

void set(nb::handle object, nb::handle name, nb::handle value) {
  if (PyObject_SetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) throw nb::python_error();
}

bool is_name(nb::handle o) { return PyUnicode_CheckExact(o.ptr()) || PyLong_CheckExact(o.ptr()); }

std::uint32_t number_of(nb::handle number) { return static_cast<std::uint32_t>(PyLong_AsUnsignedLong(number.ptr())); }

}  // namespace

std::unique_ptr<Outgoing> compose_request(nb::handle request) {
  const nb::object message = request.attr("message");
  auto m = compose_encoded(wire::kCall, 0, message);
  m->epoch = nb::cast<std::int64_t>(message.attr("epoch"));
  const nb::object name = request.attr("name");
  if (!name.is_none()) set_name(*m, number_of(name[0]), name[1]);
  return m;
}

Preparer::Preparer(const Engine& engine, const codec::Codec& codec, const AutogradHooks& autograd, nb::handle calls,
                   nb::handle environment)
    : engine_(engine),
      codec_(codec),
      autograd_(autograd),
      me_(engine.id()),
      calls_(nb::borrow(calls)),
      encode_slow_(calls.attr("encode_slow")),
      find_peer_(calls.attr("find_peer")),
      find_name_(calls.attr("find_name")),
      peers_(calls.attr("peers")),
      functions_(calls.attr("names").attr("known")),
      methods_(calls.attr("names").attr("methods")),
      current_(environment.attr("current")),
      info_type_(environment.attr("info_type")),
      form_type_(environment.attr("form_type")),
      request_type_(environment.attr("request_type")),
      future_type_(environment.attr("future_type")),
      future_devices_(nb::list()),
      by_value_(environment.attr("by_value")),
      interceptors_(environment.attr("interceptors")),
      is_grad_enabled_(environment.attr("is_grad_enabled")),
      is_autocast_enabled_(environment.attr("is_autocast_enabled")),
      running_loop_(environment.attr("running_loop")),
      caller_flags_(environment.attr("caller_flags")),
      checked_arguments_(environment.attr("checked_arguments")),
      check_blocking_(environment.attr("check_blocking")),
      id_(interned("id")),
      calls_name_(interned("_calls")),
      request_name_(interned("_request")),
      call_name_(interned("_call")),
      modes_{interned("sync"), interned("async"), interned("remote")} {}

PreparedCall Preparer::prepare(const CallForm& form) const {
  PreparedCall call;
  nb::object args = nb::borrow(form.args), kwargs = nb::borrow(form.kwargs);
  const bool positional = PyTuple_CheckExact(args.ptr()) || PyList_CheckExact(args.ptr());
  if (!positional || !PyDict_CheckExact(kwargs.ptr())) {
    if (positional && kwargs.is_none()) {
      kwargs = python_result(PyDict_New());
    } else {
      const nb::object checked = python_result(call_python(checked_arguments_.ptr(), args.ptr(), kwargs.ptr()));
      args = checked[0];
      kwargs = checked[1];
    }
  }
  const bool about_receiver = !form.receiver.is_none();
  call.peer = about_receiver || form.internal ? nb::cast<std::int32_t>(form.to) : find_peer(form.to);
  read_scope(call, form.timeout);
  // Before encoding, which counts references and records tensors.
  if (call.in_scope && form.mode == CallMode::kSync && in_event_loop()) [[unlikely]]
    python_result(PyObject_CallNoArgs(check_blocking_.ptr()));
  call.label = nb::borrow(form.function);
  Name name;
  if (!about_receiver || !form.function.is_none()) {
    name = find_name(form.function);
  } else {
    call.label = nb::str("to_here");
  }
  call.message = encode(form, call, name, args, kwargs);
  if (call.message) {
    if (about_receiver && form.mode != CallMode::kSync)
      call.keep_alive = nb::borrow(form.receiver);  // a synchronous caller holds it
    return call;
  }
  call.request = python_result(call_python(encode_slow_.ptr(), form_of(form, call, name, args, kwargs).ptr()));
  call.label = call.request.attr("label");
  call.keep_alive = call.request.attr("keep");
  // Python has decided whether interceptors get the call: another thread may have removed the last one since.
  if (call.request.type().is(request_type_)) call.message = compose_request(call.request);
  return call;
}

/// Returns number and text of a name, or None.
nb::object Preparer::pair_of(const Name& name) {
  if (name.both.is_valid()) return name.both;
  if (!name.text.is_valid()) return nb::none();
  return nb::make_tuple(name.number, name.text);
}

/// Returns the CallForm of a call, for Python.
nb::object Preparer::form_of(const CallForm& form, const PreparedCall& call, const Name& name, nb::handle args,
                             nb::handle kwargs) const {
  using Field = telegrad::wire::CallFormField;
  FieldTuple<Field> fields;
  fields.set(Field::kPeer, call.peer);
  fields.set(Field::kFunction, form.function);
  fields.set(Field::kArgs, args);
  fields.set(Field::kKwargs, kwargs);
  fields.set(Field::kTimeout, call.timeout);
  fields.set(Field::kDepth, call.depth);
  fields.set(Field::kContext, form.internal ? nb::none() : call.context);
  fields.set(Field::kMode, form.internal ? nb::str("") : modes_[static_cast<int>(form.mode)]);
  fields.set(Field::kName, pair_of(name));
  fields.set(Field::kReceiver, form.receiver);
  fields.set(Field::kIntroduce, form.introduce);
  fields.set(Field::kKeepAs, form.keep_as);
  fields.set(Field::kInternal, form.internal);
  return python_result(PyObject_Call(form_type_.ptr(), fields.take().ptr(), nullptr));
}

/// Encodes a call with the codec. Returns null if Python has to encode it.
std::unique_ptr<Outgoing> Preparer::encode(const CallForm& form, const PreparedCall& call, const Name& name,
                                           nb::handle args, nb::handle kwargs) const {
  int flags = 0;
  const bool keeps = !form.keep_as.is_none(), about_receiver = !form.receiver.is_none();
  const bool named = name.text.is_valid();
  if (!is_fast(form, call, flags) || !(named || (about_receiver && form.function.is_none()))) return nullptr;
  const nb::object body = python_result(PyTuple_New(2 + keeps + about_receiver));
  Py_ssize_t size = 0;
  const auto add = [&](nb::handle item) { PyTuple_SET_ITEM(body.ptr(), size++, item.inc_ref().ptr()); };
  add(args);
  add(kwargs);
  if (keeps) {
    flags |= wire::kKeepAs | wire::kMustDeliver | wire::kMustRun;
    add(form.keep_as);
  }
  if (about_receiver) {
    flags |= wire::kReceiver;
    add(python_result(PyTuple_GetSlice(form.receiver.attr(id_).ptr(), 0, 2)));
  }
  codec::Encoded encoded;
  nb::object message;
  // Telegrad itself makes a request for the type of a value: it counts for no context and for no shutdown.
  const bool internal = about_receiver && form.function.is(nb::handle(reinterpret_cast<PyObject*>(&PyType_Type)));
  if (internal) flags |= wire::Flag::kInternal;
  const bool in_context = !call.context.is_none() && !internal;
  // Before the recording, and the registration of a reference: if the session ends meanwhile, the message is not sent.
  const std::int64_t epoch = in_context || keeps ? engine_.epoch_of(call.peer) : kAnyEpoch;
  const bool encodable = in_context
                             ? autograd_.encode(codec_, body, call.peer, call.context, true, epoch, encoded, message)
                             : is_encoded(codec_.encode_basic(body.ptr(), encoded));
  if (!encodable) return nullptr;
  if (in_context) flags |= wire::kMustDeliver;  // counted at the caller: the callee's context waits for it when it ends
  encoded.versioned = encoded.needs_versions() && engine_.may_be_resumable(call.peer);
  auto m = compose(wire::kCall, flags, encoded);
  m->epoch = epoch;
  // A large request may arrive without its content, so its metadata names the reference to create, too.
  const bool large = keeps && m->payload_size() + (named ? PyBytes_GET_SIZE(name.text.ptr()) : 0) >= kAlwaysTaken;
  if (in_context || large) {
    nb::object target = nb::none();
    if (large) target = nb::make_tuple(me_, form.keep_as);
    if (!in_context) message = nb::int_(0);
    const bool in_chain = call.in_scope && call.context.is(autograd_.plain());
    add_metadata(*m, codec_, target, in_chain ? call.chain : id_of(call.context), message);
  }
  if (named) set_name(*m, name.number, name.text);
  return m;
}

/// Decides whether the codec may encode a call on its own; no other code does.
bool Preparer::is_fast(const CallForm& form, const PreparedCall& call, int& flags) const {
  if (form.introduce || form.internal || PyDict_GET_SIZE(interceptors_.ptr()) != 0) return false;
  if (!returns(is_autocast_enabled_, Py_False)) return false;
  const bool creates = !form.keep_as.is_none();
  if (returns(is_grad_enabled_, Py_True)) return true;
  if (creates || !call.context.is_none()) return false;
  flags = nb::cast<int>(python_result(PyObject_CallNoArgs(caller_flags_.ptr())));
  return true;
}

void Preparer::read_scope(PreparedCall& call, Nanos timeout) const {
  call.timeout = timeout;
  PyObject* found = nullptr;
  if (PyContextVar_Get(current_.ptr(), nullptr, &found) != 0) throw nb::python_error();
  const nb::object scope = nb::steal(found);
  call.in_scope = scope.is_valid() && !scope.is_none();
  if (call.in_scope) {
    call.context = nb::borrow(PyTuple_GET_ITEM(scope.ptr(), wire::ScopeField::kAutograd));
    call.chain = nb::borrow(PyTuple_GET_ITEM(scope.ptr(), wire::ScopeField::kChain));
  }
  if (call.context.is_none() && !autograd_.outside().is_none()) call.context = autograd_.outside();
  // Without grad mode nothing is recorded outside of contexts, as in local code.
  if (call.context.is(autograd_.plain()) && !returns(is_grad_enabled_, Py_True)) call.context = nb::none();
  if (!call.in_scope) return;
  call.depth = static_cast<std::uint32_t>(PyLong_AsLong(PyTuple_GET_ITEM(scope.ptr(), wire::ScopeField::kDepth)));
  if (PyTuple_GET_ITEM(scope.ptr(), wire::ScopeField::kLimitsCalls) != Py_True) return;
  const Nanos deadline = nb::cast<Nanos>(nb::handle(PyTuple_GET_ITEM(scope.ptr(), wire::ScopeField::kDeadline)));
  if (deadline == 0) return;
  const Nanos left = std::max<Nanos>(deadline - now(), 1);
  call.timeout = timeout == 0 ? left : std::min(timeout, left);
}

std::int32_t Preparer::find_peer(nb::handle to) const {
  nb::object key = nb::borrow(to);
  if (Py_TYPE(to.ptr()) == reinterpret_cast<PyTypeObject*>(info_type_.ptr())) key = key.attr(id_);
  PyObject* info = is_name(key) ? find(peers_, key) : nullptr;
  const nb::object id = info ? nb::handle(info).attr(id_) : python_result(call_python(find_peer_.ptr(), to.ptr()));
  return nb::cast<std::int32_t>(id);
}

/// Finds the name of a method or function: the cached one if it still names this function, else by `NameTable.find`.
Preparer::Name Preparer::find_name(nb::handle function) const {
  using Field = telegrad::wire::KnownNameField;
  Name name;
  if (PyUnicode_CheckExact(function.ptr())) {
    if (PyObject* known = find(methods_, function)) {
      name.number = number_of(PyTuple_GET_ITEM(known, 0));
      name.text = nb::borrow(PyTuple_GET_ITEM(known, 1));
      return name;
    }
  } else if (PySet_GET_SIZE(by_value_.ptr()) == 0) {
    PyObject* known = in_python([&] { return PyDict_GetItemWithError(functions_.ptr(), function.ptr()); });
    if (!known && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
    PyErr_Clear();  // it cannot be hashed
    if (known && PyTuple_Check(known) && PyTuple_GET_SIZE(known) == Field::kCount) {
      PyObject* home = PyTuple_GET_ITEM(known, Field::kHome);
      if (home == Py_None || find(nb::borrow(home), PyTuple_GET_ITEM(known, Field::kName)) == function.ptr()) {
        name.number = number_of(PyTuple_GET_ITEM(known, Field::kNumber));
        name.text = nb::borrow(PyTuple_GET_ITEM(known, Field::kText));
        return name;
      }
    }
  }
  const nb::object found = python_result(call_python(find_name_.ptr(), function.ptr()));
  if (found.is_none()) return name;
  name.both = found;
  name.number = number_of(found[0]);
  name.text = found[1];
  return name;
}

nb::object Preparer::future(const PreparedCall& call) const {
  nb::object future = python_result(call_python(future_type_.ptr(), future_devices_.ptr()));
  const nb::object peer = python_result(PyLong_FromLong(call.peer));
  const nb::object timeout = python_result(PyLong_FromLongLong(call.timeout));
  set(future, calls_name_, calls_);
  set(future, request_name_, python_result(PyTuple_Pack(3, peer.ptr(), call.label.ptr(), timeout.ptr())));
  return future;
}

void Preparer::set_call(nb::handle target, std::uint64_t id) const {
  set(target, call_name_, python_result(PyLong_FromUnsignedLongLong(id)));
}

bool Preparer::in_event_loop() const { return !returns(running_loop_, Py_None); }

int Preparer::traverse(visitproc visit, void* arg) const {
  for (const nb::object* o : {&calls_,
                              &encode_slow_,
                              &find_peer_,
                              &find_name_,
                              &peers_,
                              &functions_,
                              &methods_,
                              &current_,
                              &info_type_,
                              &form_type_,
                              &request_type_,
                              &future_type_,
                              &future_devices_,
                              &by_value_,
                              &interceptors_,
                              &is_grad_enabled_,
                              &is_autocast_enabled_,
                              &running_loop_,
                              &caller_flags_,
                              &checked_arguments_,
                              &check_blocking_}) {
    Py_VISIT(o->ptr());
  }
  return 0;
}

}  // namespace telegrad::python
