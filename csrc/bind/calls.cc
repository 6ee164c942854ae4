#include "bind/calls.h"

#include <nanobind/nanobind.h>

#include <optional>

#include "bind/interruption.h"
#include "bind/loans.h"
#include "bind/messages.h"
#include "codec/gil.h"

namespace telegrad::bind {
namespace {

/// What is sent with the GIL held lets go of it before it would wait for another thread's sending.
class GilUntilBlocked {
 public:
  std::function<void()> before_blocking() {
    return [this] { released_.emplace(); };
  }

 private:
  std::optional<GilReleased> released_;
};

}  // namespace

Outcome call_and_wait(Engine& e, std::int32_t peer, std::unique_ptr<Outgoing> m, CallOptions o,
                      const std::function<void()>& take_lazy) {
  const Nanos deadline = o.deadline;
  Interruption interruption;
  const auto interrupted = o.interrupted = interruption.ask();
  Outcome outcome;
  WaitEnd end;
  {
    const GilReleased no_gil;
    const std::uint64_t id = e.start(peer, std::move(m), std::move(o));
    if (take_lazy && e.has_lazy()) {
      const GilHeld gil;
      take_lazy();
    }
    end = interruption.raised() ? WaitEnd::kInterrupted : e.wait(id, deadline, interrupted, outcome);
    if (end != WaitEnd::kDone) e.give_up(id);
  }
  let_go(m);
  release_references();
  if (end == WaitEnd::kInterrupted) nb::raise_python_error();
  if (end == WaitEnd::kDeadline) outcome.status = CallStatus::kTimedOut;
  if (end == WaitEnd::kStopped) outcome.status = CallStatus::kStopped;
  outcome.peer = peer;
  return outcome;
}

std::uint64_t begin_call(Engine& e, std::int32_t peer, std::unique_ptr<Outgoing> m, CallOptions o, bool never_wait,
                         std::uint64_t* begun) {
  const std::uint64_t size = m->payload_size();
  const bool small = size <= kSmall;
  o.never_wait = never_wait || (small && e.may_send_now(peer, size));
  Interruption interruption;
  o.interrupted = interruption.ask();
  std::uint64_t id;
  if (small && o.never_wait) {
    GilUntilBlocked gil;
    o.before_blocking = gil.before_blocking();
    id = e.start(peer, std::move(m), std::move(o));
  } else {
    const GilReleased no_gil;
    id = e.start(peer, std::move(m), std::move(o));
  }
  if (e.stopping() && e.withdraw(id)) id = 0;
  let_go(m);
  release_references();
  if (begun) *begun = id;
  if (interruption.raised()) nb::raise_python_error();  // the call may be under way; its outcome goes to the pool
  return id;
}

bool take_outcome(Engine& e, std::uint64_t call, Nanos timeout, Outcome& out) {
  Interruption interruption;
  const auto interrupted = interruption.ask();
  WaitEnd end;
  {
    const GilReleased no_gil;
    end = e.wait(call, deadline_after(now(), timeout), interrupted, out);
  }
  release_references();
  if (end == WaitEnd::kInterrupted) nb::raise_python_error();
  return end == WaitEnd::kDone;
}

void send_reply(Engine& e, std::uint64_t connection, std::uint64_t call, std::unique_ptr<Outgoing> m) {
  give_loans(*m, connection);
  if (m->payload_size() <= kSmall) {
    GilUntilBlocked gil;
    e.reply(connection, call, std::move(m), false, gil.before_blocking());
  } else {
    const GilReleased no_gil;
    e.reply(connection, call, std::move(m), true);
  }
  let_go(m);
  release_references();
}

}  // namespace telegrad::bind
