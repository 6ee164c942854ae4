#include "python/completion.h"

#include <utility>

#include "codec/gil.h"
#include "python/errors.h"
#include "python/wire.h"

namespace telegrad::python {
namespace {

/// Returns the flags of a reply that need the slow path; 0 if the codec can decode it.
int slow_flags(const Completion& o) {
  if (o.status != CallStatus::kReplied || o.reply.header.tag != wire::kValue) return wire::kSlowReply;
  return o.reply.header.flags & wire::kSlowReply;
}

}  // namespace

nb::object decode_body(const codec::Codec& codec, Incoming& message, const nb::object& wrap) {
  nb::object value;
  if (message.segments.empty()) {
    value = nb::steal(codec.decode(message.body_view(), {}, wrap.ptr()));
  } else {
    auto memories = memories_of(message.segments);
    value = nb::steal(codec.decode(message.body_view(), memories, wrap.ptr()));
  }
  if (!value.is_valid()) throw nb::python_error();
  return value;
}

Completions::Completions(const codec::Codec& codec, const AutogradHooks& autograd, nb::handle calls,
                         nb::object future_type)
    : codec_(codec),
      autograd_(autograd),
      future_type_(std::move(future_type)),
      set_result_(calls.attr("set_result")),
      result_(calls.attr("result")),
      finish_(calls.attr("finish")),
      fail_(calls.attr("fail")) {}

nb::object Completions::value(Completion&& completion, nb::handle context, nb::handle label, Nanos timeout) const {
  const int slow = slow_flags(completion);
  if (slow == 0) return decode_body(codec_, completion.reply);
  ContextTag in;
  if (slow == wire::kMetadata && !context.is_none() && AutogradHooks::read(codec_, completion.reply, in) &&
      in.id.is_valid()) {
    const nb::object wrap = autograd_.wrap(in, completion.peer, context);
    completion.reply.segments.pop_back();
    return decode_body(codec_, completion.reply, wrap);
  }
  const nb::object call = nb::make_tuple(completion.peer, label, timeout);
  return python_result(call_python(result_.ptr(), completion_tuple(std::move(completion)).ptr(), call.ptr()));
}

nb::object Completions::complete(nb::handle target, Completion&& completion) const {
  if (target.type().ptr() != future_type_.ptr()) {
    python_result(call_python(target.ptr(), completion_tuple(std::move(completion)).ptr()));
    return {};
  }
  nb::object value;
  const nb::object error = error_of([&] {
    if (slow_flags(completion) != 0) {
      python_result(call_python(finish_.ptr(), target.ptr(), completion_tuple(std::move(completion)).ptr()));
      return;
    }
    value = decode_body(codec_, completion.reply);
    python_result(call_python(set_result_.ptr(), target.ptr(), value.ptr()));
  });
  if (!error.is_valid()) return value;
  const bool is_done = nb::cast<bool>(target.attr("done")());
  if (is_done && nb::cast<bool>(target.attr("_is_set")) && PyErr_GivenExceptionMatches(error.ptr(), PyExc_RuntimeError))
    return {};    // the program has completed it meanwhile
  if (is_done) {  // raised by a callback of the program or by a signal handler
    PyErr_SetObject(error.type().ptr(), error.ptr());
    throw nb::python_error();
  }
  fail(target, error);
  return {};
}

void Completions::fail(nb::handle future, const nb::object& error) const {
  python_result(call_python(fail_.ptr(), future.ptr(), error.ptr()));
}

int Completions::traverse(visitproc visit, void* arg) const {
  for (const nb::object* o : {&future_type_, &set_result_, &result_, &finish_, &fail_}) Py_VISIT(o->ptr());
  return 0;
}

}  // namespace telegrad::python
