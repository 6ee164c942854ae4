#include "python/calls.h"

#include <nanobind/nanobind.h>

#include <optional>

#include "codec/gil.h"
#include "python/buffer_leases.h"
#include "python/messages.h"
#include "python/signal_check.h"
#include "python/tensor_versions.h"

namespace telegrad::python {
namespace {

/// Releases the GIL before a send would wait for the send of another thread.
class ReleaseGilIfContended {
 public:
  std::function<void()> before_blocking() {
    return [this] { released_.emplace(); };
  }

 private:
  std::optional<GilReleased> released_;
};

}  // namespace

Completion call_and_wait(Engine& e, std::int32_t peer, std::unique_ptr<Outgoing> m, CallOptions o,
                         const std::function<void()>& take_deferred) {
  const Nanos deadline = o.deadline;
  SignalCheck signals;
  const auto interrupted = o.interrupted = signals.ask();
  o.waits = true;
  Completion completion;
  WaitEnd end;
  {
    const GilReleased no_gil;
    const std::uint64_t id = e.start(peer, std::move(m), std::move(o));
    if (take_deferred && !signals.raised() && e.has_deferred()) {
      const GilHeld gil;
      try {
        take_deferred();
      } catch (nb::python_error& raised) {
        signals.raise(raised);
      }
    }
    end = signals.raised() ? WaitEnd::kInterrupted : e.wait(id, deadline, interrupted, completion);
    if (end == WaitEnd::kDeadline) end = e.expire(id, interrupted, completion);
    if (end != WaitEnd::kDone) e.give_up(id);
  }
  release_message(m);
  decref_deferred();
  if (end == WaitEnd::kInterrupted) nb::raise_python_error();
  if (end == WaitEnd::kStopped) completion.status = CallStatus::kStopped;
  completion.peer = peer;
  return completion;
}

std::uint64_t begin_call(Engine& e, std::int32_t peer, std::unique_ptr<Outgoing> m, CallOptions o, bool never_wait,
                         std::uint64_t* begun) {
  const std::uint64_t size = m->payload_size();
  const bool small = size <= kSmall;
  o.never_wait = never_wait || (small && e.may_send_now(peer, size));
  SignalCheck signals;
  o.interrupted = signals.ask();
  if (size > kMaxCopied && e.may_be_resumable(peer)) record_versions(*m);
  std::uint64_t id;
  if (small && o.never_wait) {
    ReleaseGilIfContended gil;
    o.before_blocking = gil.before_blocking();
    id = e.start(peer, std::move(m), std::move(o));
  } else {
    const GilReleased no_gil;
    id = e.start(peer, std::move(m), std::move(o));
  }
  if (e.stopping() && e.remove_completion(id)) id = 0;
  release_message(m);
  decref_deferred();
  if (begun) *begun = id;
  if (signals.raised()) nb::raise_python_error();  // the call may be under way; its completion goes to the thread pool
  return id;
}

bool cancel_call(Engine& e, std::uint64_t call, WorkItem& taken) {
  bool canceled;
  {
    ReleaseGilIfContended gil;
    canceled = e.cancel(call, taken, gil.before_blocking());
  }
  decref_deferred();
  return canceled;
}

bool take_completion(Engine& e, std::uint64_t call, Nanos timeout, Completion& out) {
  SignalCheck signals;
  const auto interrupted = signals.ask();
  WaitEnd end;
  {
    const GilReleased no_gil;
    end = e.wait(call, deadline_after(now(), timeout), interrupted, out);
  }
  decref_deferred();
  if (end == WaitEnd::kInterrupted) nb::raise_python_error();
  return end == WaitEnd::kDone;
}

bool send_reply(Engine& e, std::uint64_t connection, std::uint64_t call, std::unique_ptr<Outgoing> m) {
  const std::uint64_t size = m->payload_size();
  if (size > kMaxCopied && e.is_resumable(connection)) {
    record_versions(*m);  // the owners are needed to verify it
  } else {
    hand_off_leases(*m, connection);
  }
  bool sent;
  if (size <= kSmall) {
    ReleaseGilIfContended gil;
    sent = e.reply(connection, call, std::move(m), false, gil.before_blocking());
  } else {
    const GilReleased no_gil;
    sent = e.reply(connection, call, std::move(m), true);
  }
  release_message(m);
  decref_deferred();
  return sent;
}

}  // namespace telegrad::python
