// Sending of requests by the binding: release of the GIL, signals, lifetime of memory.
#pragma once

#include <functional>
#include <memory>

#include "core/engine.h"

namespace telegrad::python {

/// Sends a request and waits for its completion, without the GIL. If deferred completions are queued after the send,
/// calls `take_deferred` with the GIL. Throws the exception of a signal handler.
Completion call_and_wait(Engine& e, std::int32_t peer, std::unique_ptr<Outgoing> m, CallOptions o,
                         const std::function<void()>& take_deferred = {});

/// Sends a request and returns its call id; the completion goes to the thread pool with the options' target. Unless
/// `never_wait`, blocks until the peer's window has room and a large request has been sent. Returns 0 if the engine has
/// been stopped: the call gets no completion. Throws the exception of a signal handler; the call is under way
/// nevertheless, and `begun` has its id.
std::uint64_t begin_call(Engine& e, std::int32_t peer, std::unique_ptr<Outgoing> m, CallOptions o, bool never_wait,
                         std::uint64_t* begun = nullptr);

/// Cancels a started call, like `Engine::cancel`.
bool cancel_call(Engine& e, std::uint64_t call, WorkItem& taken);

/// Waits for the completion of a started call, without the GIL, like `Engine::wait`. Returns false if it did not come
/// to this thread. Throws the exception of a signal handler.
bool take_completion(Engine& e, std::uint64_t call, Nanos timeout, Completion& out);

/// Replies to a request. Tensors in leased memory are sent without a copy if only the message holds them. Releases the
/// GIL for a large message, or if another thread is sending.
bool send_reply(Engine& e, std::uint64_t connection, std::uint64_t call, std::unique_ptr<Outgoing> m);

}  // namespace telegrad::python
