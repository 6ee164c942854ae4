"""Waiting for many futures at once."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch.futures import Future

from telegrad import _core
from telegrad.errors import NotInitialized
from telegrad.serialize.tracebacks import strip_own_frames
from telegrad.waits import wait_for
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.future import CallFuture

__all__ = ["failure_of", "on_first_failure", "wait_all"]

T = TypeVar("T")

_PENDING = object()
_add_done_callback = torch._C.Future.add_done_callback  # bypasses the count of the program's callbacks


@overload
def wait_all(futures: Sequence[Future[T]]) -> list[T]: ...
@overload
def wait_all(futures: Sequence[Future[Any]]) -> list[Any]: ...


def wait_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all of these futures, or for the first that fails.

    The waiting thread polls the network, as in ``wait`` of one future, which saves thread switches. If one of the
    futures has callbacks, the thread only waits: a callback may wait for other futures of the list, so callbacks run on
    pool threads of the worker.

    Args:
        futures: Futures of Telegrad and of torch, in any mix. May be empty.

    Returns:
        Their values, in the same order.

    Raises:
        Exception: Whatever the first failed future raises; the others are not awaited, nor are their failures logged.

    Example::

        futures = [rpc.rpc_async(name, max, args=(1, 2)) for name in ("worker1", "worker2")]
        assert rpc.wait_all(futures) == [2, 2]
    """
    given = list(futures)
    try:
        if asyncio._get_running_loop() is not None and not all(future.done() for future in given):
            check_blocking("wait_all", "`await asyncio.gather(*futures)`")
        try:
            return _wait_all(given)
        except Exception:
            for future in given:
                if isinstance(future, CallFuture):
                    future._mark_read()
            raise
    except Exception as error:
        raise strip_own_frames(error)


def _wait_all(futures: list[Future[T]]) -> list[T]:
    values: list[Any] = [_PENDING] * len(futures)
    if not _collect(futures, values):
        failed = _first_failure(futures)
        if failed is not None:
            failed.wait()
    return [future.wait() if value is _PENDING else value for future, value in zip(futures, values, strict=True)]


def _collect(futures: list[Any], values: list[object]) -> bool:
    """Collect completions in this thread, and store plain values in the list.

    Returns False unless all futures are calls of one worker without callbacks, none of which has failed.
    """
    try:
        calls = futures[0]._calls
        ids = [
            f._call
            for f in futures
            if type(f) is CallFuture and f._calls is calls and f._failure is None and not f._has_callbacks
        ]
    except (AttributeError, IndexError):
        return False
    if len(ids) < len(futures):
        return False
    try:
        failed = calls.client.complete_many(futures, ids, values, _notify_on_done)
    except NotInitialized:  # the worker has closed: no further completion arrives
        return True
    if failed is False:
        return False
    if failed is not None:
        failed.wait()
    return True


def _notify_on_done(future: CallFuture[object]) -> None:
    """Wake waiting threads when another thread has completed this future."""
    calls = future._calls
    _add_done_callback(future, lambda _: calls.client.notify_wait_sets())


def _first_failure(futures: list[Future[T]]) -> Future[T] | None:
    """Wait until one future has failed, and return it, or until all have succeeded."""
    if not futures:
        return None
    decided = threading.Event()
    first: Future[T] | None = None

    def decide(failed: Future[T] | None) -> None:
        nonlocal first
        first = failed
        decided.set()

    on_first_failure(futures, decide)
    wait_for(decided)
    return first


def on_first_failure(futures: list[Future[T]], decide: Callable[[Future[T] | None], None]) -> None:
    """Run a function once: when a future has failed, or when all have succeeded.

    Args:
        futures: The futures, at least one.
        decide: Gets the first failed future, or None. Runs in the thread that completes the last future it needs.
    """
    lock = threading.Lock()
    left = len(futures)

    def completed(future: Future[T], _: object) -> None:
        nonlocal left
        has_failed = failure_of(future) is not None
        with lock:
            if left <= 0:
                return  # decided already
            left = 0 if has_failed else left - 1
            if left:
                return
        decide(future if has_failed else None)

    for future in futures:
        _add_done_callback(future, _core.shielded(partial(completed, future)))


def failure_of(future: Future[T]) -> BaseException | None:
    """Return the exception of a future that is done, if any.

    The failure of a call still counts as unread.
    """
    if isinstance(future, CallFuture):
        return future.failure()
    try:
        future.value()
    except BaseException as error:
        return error
    return None
