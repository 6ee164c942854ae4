"""Fault injection: messages that are dropped or delayed on purpose (rpc._testing)."""

from collections.abc import Callable
from typing import Protocol

from torch.futures import Future

from telegrad.errors import RpcTimeout, TelegradError
from telegrad.worker.calls.callables import name_of
from telegrad.worker.calls.future import NO_DEVICES, CallFuture
from telegrad.worker.calls.messages import Messages, Request
from telegrad.worker.calls.pending_work import PendingWork
from telegrad.worker.calls.tracing import Span
from telegrad.worker.closed import WorkerCalls

__all__ = ["DroppedMessage", "Filter", "send", "start"]

Filter = Callable[[str, bool, int, int], float | None]  # see telegrad.compat.rpc._testing.faults.Faults


class DroppedMessage(TelegradError):
    """Raised by a fault injector to drop a message."""


class Creation(Protocol):
    """Call that creates a value (telegrad.rref.creation)."""

    _call: int  # id of the call, once sent

    def attach(self, span: Span) -> None: ...
    def delayed(self, scripted: bool) -> CallFuture[object]: ...


class Sender(WorkerCalls, Protocol):
    """`telegrad.worker.calls.client.Calls`, with a fault injector."""

    messages: Messages
    delay: Callable[[float, Callable[[], object]], None] | None

    @property
    def send_filter(self) -> Filter | None: ...

    def name_of(self, worker_id: int, /) -> str: ...


def start(calls: Sender, request: Request, target: CallFuture[object] | Creation) -> None:
    """Send a request like `Calls.send`, through the fault injector.

    Args:
        calls: Calls of the sender.
        request: The encoded request.
        target: A future, or a creation, which then creates a future.
    """
    assert calls.send_filter is not None
    assert calls.delay is not None
    future: CallFuture[object] = target if isinstance(target, CallFuture) else target.delayed(request.scripted)
    try:
        seconds = calls.send_filter(request.kind, request.scripted, request.peer, 0)
    except DroppedMessage as e:
        calls.messages.rollback(request.peer, request.message)
        future.set_exception(e)
        return
    if not seconds:
        calls.client.start_request(request, future)
        return

    inner: CallFuture[object] = CallFuture(NO_DEVICES)
    inner._calls, inner._request = calls, (request.peer, request.label, 0)
    label = request.label if isinstance(request.label, str) else name_of(request.label)
    call_text = f"{label} on {calls.name_of(request.peer)}"
    is_cancelable = request.kind != "remote"  # other workers may use the value of a creation
    work = PendingWork(future, call_text, is_cancelable)

    def send_late() -> None:
        if work.error is not None and is_cancelable:
            calls.messages.rollback(request.peer, request.message)
            return
        try:
            calls.client.start_request(request._replace(timeout=0), inner)
        except Exception as e:
            inner.set_exception(e)
        else:
            if is_cancelable:
                work.add(inner.cancel)

    def complete(done: Future[object]) -> None:
        try:
            value = done.value()
        except BaseException as e:  # SystemExit too, which a handler raised
            work.fail(e)
        else:
            if not work.succeed(value) and future._on_late_reply is not None:
                future._on_late_reply()

    inner._read = True  # the caller's future logs a failure
    inner._on_done(complete)
    if request.timeout:
        late = RpcTimeout(request.timeout / 1e9, call_text, "delayed")
        calls.delay(request.timeout / 1e9, lambda: work.end(late))
    calls.delay(seconds, send_late)


def send(calls: Sender, kind: str, scripted: bool, peer: int, send_now: Callable[[], object], attempt: int = 0) -> None:
    """Send a message that must arrive; if dropped, send again after a growing delay."""
    if calls.send_filter is None or calls.delay is None:
        send_now()
        return
    try:
        seconds = calls.send_filter(kind, scripted, peer, attempt)
    except DroppedMessage:
        calls.delay(0.01 * 2**attempt, lambda: send(calls, kind, scripted, peer, send_now, attempt + 1))
        return
    if seconds:
        calls.delay(seconds, send_now)
    else:
        send_now()
