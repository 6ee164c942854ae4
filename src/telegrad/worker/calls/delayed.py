"""Requests that are sent later, for interceptors that delay a call."""

from typing import Any, Protocol

from telegrad.errors import RpcTimeout
from telegrad.worker.calls.callables import name_of
from telegrad.worker.calls.encoded import Request
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.messages import Messages
from telegrad.worker.calls.pending_work import OpenWork, PendingWork
from telegrad.worker.closed import WorkerCalls

__all__ = ["send_later"]


class Sender(WorkerCalls, Protocol):
    """`telegrad.worker.calls.client.Calls`, as this module uses it."""

    messages: Messages

    def name_of(self, worker_id: int, /) -> str: ...


def send_later(calls: Sender, open_work: OpenWork, request: Request, future: CallFuture[Any], seconds: float) -> None:
    """Send a request after a delay, which counts towards its timeout.

    Args:
        calls: Calls of the sender.
        open_work: Pending work of the sender.
        request: The encoded request.
        future: Completed with the result. Canceling it before the request is sent undoes the encoding.
        seconds: The delay.
    """
    # The caller's future logs a failure.
    inner: CallFuture[Any] = CallFuture._of(calls, (request.peer, request.label, 0), is_read=True)
    label = request.label if isinstance(request.label, str) else name_of(request.label)
    call_text = f"{label} on {calls.name_of(request.peer)}"
    is_cancelable = request.keep_as is None  # other workers may use the value of a creation
    work = PendingWork(future, call_text, is_cancelable)

    def send() -> None:
        if work.error is not None and is_cancelable:
            calls.messages.rollback(request.peer, request.message, request=True)
            return
        try:
            calls.client.start_request(request._replace(timeout=0), inner)
        except Exception as e:
            inner._fail(e)
        else:
            if is_cancelable:
                work.add(inner.cancel)

    work.follow(inner, on_unused=future._report_late_reply)
    if request.timeout:
        late = RpcTimeout(request.timeout / 1e9, call_text, "delayed")
        open_work.run_later(request.timeout / 1e9, work.end, late)
    open_work.add(work)
    open_work.run_later(seconds, send)
