// Sending of requests by the binding: release of the GIL, signals, lifetime of memory.
#pragma once

#include <functional>
#include <memory>

#include "core/engine.h"

namespace telegrad::python {

/// Sends a request and waits for its outcome, without the GIL. Calls `take_deferred`, with the GIL, while the peer is
/// at it and if there is something to take. Raises what a signal handler raises.
Completion call_and_wait(Engine& e, std::int32_t peer, std::unique_ptr<Outgoing> m, CallOptions o,
                         const std::function<void()>& take_deferred = {});

/// Sends a request; its completion goes to the pool with the options' target. Unless `never_wait`, a large request's
/// memory has left when this returns, and the peer's window is waited for. 0: the engine has been stopped, and nothing
/// will come of the call. Raises what a signal handler raises; the call is under way all the same, and `begun` has its
/// id.
std::uint64_t begin_call(Engine& e, std::int32_t peer, std::unique_ptr<Outgoing> m, CallOptions o, bool never_wait,
                         std::uint64_t* begun = nullptr);

/// Waits for the outcome of a call that was begun, without the GIL, as `Engine::wait`; false if there is none. Raises
/// what a signal handler raises.
bool take_completion(Engine& e, std::uint64_t call, Nanos timeout, Completion& out);

/// Replies to a request. Only the message may hold tensors in leased memory that are sent without a copy.
void send_reply(Engine& e, std::uint64_t connection, std::uint64_t call, std::unique_ptr<Outgoing> m);

}  // namespace telegrad::python
