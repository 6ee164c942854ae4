"""Requests of a stream's caller, apart from the one that opens it."""

from collections.abc import Callable
from typing import Any

from telegrad.errors import TelegradError
from telegrad.streams import serving
from telegrad.worker import Worker, current
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.scope import Scope

__all__ = ["guarded", "notify_closed", "start_step"]


def guarded(
    arrived: Callable[[CallFuture[Any]], None], failed: Callable[[BaseException], None]
) -> Callable[[CallFuture[Any]], None]:
    """Return a callback of a future that passes its exceptions on: torch drops them.

    A signal handler may raise in it, because the main thread polls.
    """

    def run(future: CallFuture[Any]) -> None:
        try:
            arrived(future)
        except BaseException as e:
            failed(e)

    return run


def start_step(
    worker: Worker, peer: int, scope: Scope, function: object, args: tuple[int, ...], polled: bool
) -> CallFuture[Any]:
    """Send a request in the scope of a stream; never blocks.

    Args:
        worker: The caller.
        peer: Id of the callee.
        scope: Scope of the code that opened the stream.
        function: Function of `telegrad.streams.serving`.
        args: Its arguments after the caller's id.
        polled: This thread will soon wait for the reply.
    """
    token = current.set(scope)
    try:
        future: CallFuture[Any] = worker.calls.client.start(
            peer, function, (worker.info.id, *args), {}, 0, None, False, False, polled
        )
        return future
    finally:
        current.reset(token)


def notify_closed(worker: Worker, peer: int, scope: Scope, number: int, is_opening: bool) -> None:
    """Have the callee close the generator.

    Args:
        worker: The caller.
        peer: Id of the callee.
        scope: Scope of the code that opened the stream.
        number: The caller's number for the stream.
        is_opening: This message may overtake the request that opens the stream.
    """
    if worker.closed or peer in worker.members.lost:
        return
    token = current.set(scope._replace(deadline=0, autograd=None))  # also after the deadline of the reader
    try:
        future = worker.start_internal(peer, serving.close, (worker.info.id, number, is_opening), 0)
    except TelegradError:
        return
    finally:
        current.reset(token)
    future._mark_read()
