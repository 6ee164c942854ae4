"""Stream: the items of a generator on another worker, as the program reads them."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, NoReturn, Self, TypeVar

from telegrad.errors import StreamError
from telegrad.serialize.tracebacks import strip_own_frames
from telegrad.streams.read_errors import STATE_GRACE
from telegrad.streams.receiver import FLUSH_DELAY, Receiver
from telegrad.worker import Worker, current
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.callables import checked_arguments, name_of
from telegrad.worker.scope import Scope, caller_flags

__all__ = ["PREFETCH", "Stream", "open_stream"]

T_co = TypeVar("T_co", covariant=True)

PREFETCH: Final = 256
"""Most items that are produced ahead of the reader."""


class Stream(Generic[T_co]):
    """Items of a generator on another worker.

    A stream is an iterator and an asynchronous iterator. `telegrad.rpc.stream` opens it. The
    generator runs while items are fetched ahead of the reader, and stops when the reader is slow. As a context manager
    it is closed at the end of the block, also after ``break`` or an error. Otherwise it is closed when it is collected.

    An error of the generator is raised after the items before it. A stream is read once, by one thread or task at a
    time: it raises `telegrad.errors.StreamError` if two of them wait for an item at once, or if a second loop begins
    after its end.

    Example::

        def squares(n):
            for i in range(n):
                yield i * i

        with rpc.stream("worker1", squares, args=(10_000,)) as items:
            for item in items:
                if item > 50:
                    break
        print(item)  # 64
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._batch: Iterator[Any] = iter(())

    # ---- iterator

    def __iter__(self) -> Self:
        self._check_unread()
        return self

    def __next__(self) -> T_co:
        for item in self._batch:
            return item  # type: ignore[no-any-return]
        try:
            self._batch = iter(self._wait())
        except Exception as error:
            raise strip_own_frames(error)
        return next(self._batch)  # type: ignore[no-any-return]

    def _wait(self) -> list[Any]:
        """Return the next batch; StopIteration at the end."""
        receiver, me = self._receiver, threading.get_ident()
        items, more = receiver.take(me)
        if items is not None:
            return items
        if more:
            try:
                if asyncio._get_running_loop() is not None:
                    check_blocking("reading a stream", "`async for`")
                until = time.monotonic_ns() + receiver.timeout if receiver.timeout else 0
                receiver.drive(min(FLUSH_DELAY, receiver.timeout) if until else FLUSH_DELAY)
                items, more = receiver.take(me)
                while items is None and more:
                    receiver.flush()
                    left = until - time.monotonic_ns() if until else 0
                    expired = until and left <= 0
                    if expired:
                        receiver.begin_expiry()
                    receiver.drive(STATE_GRACE if expired else left)
                    if expired and receiver.has_expired:
                        receiver.expire()
                    items, more = receiver.take(me)
            finally:
                receiver.end_read()
        if items is None:
            raise StopIteration
        return items

    # ---- asynchronous iterator

    def __aiter__(self) -> Self:
        self._check_unread()
        return self

    async def __anext__(self) -> T_co:
        for item in self._batch:
            return item  # type: ignore[no-any-return]
        try:
            self._batch = iter(await self._wait_async())
        except asyncio.CancelledError:
            self.close()
            raise
        except Exception as error:
            raise strip_own_frames(error)
        return next(self._batch)  # type: ignore[no-any-return]

    async def _wait_async(self) -> list[Any]:
        receiver, loop, me = self._receiver, asyncio.get_running_loop(), asyncio.current_task()
        receiver.is_async = True
        items, more = receiver.take(me)
        if items is not None:
            return items
        if not more:
            raise StopAsyncIteration
        arrived = asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(arrived.set)
            except RuntimeError:  # the loop has closed: no task waits
                pass

        receiver.wake = wake
        try:
            until = time.monotonic_ns() + receiver.timeout if receiver.timeout else 0
            delay: int | None = FLUSH_DELAY
            while True:  # each arrival, also of an answer to `flush`, may be the time for another one
                arrived.clear()
                items, more = receiver.take(me)
                if items is not None or not more:
                    break
                if delay is None:
                    receiver.flush()
                left = until - time.monotonic_ns() if until else None
                if left is not None and left <= 0:
                    receiver.begin_expiry()
                    await _wait_until_set(arrived, STATE_GRACE)
                    if receiver.has_expired:
                        receiver.expire()
                    continue
                limits = [limit for limit in (left, delay) if limit is not None]
                if not await _wait_until_set(arrived, min(limits) if limits else None):
                    delay = None
        finally:
            receiver.wake = None
            receiver.end_read()
        if items is None:
            raise StopAsyncIteration
        return items

    # ---- the end

    def _check_unread(self) -> None:
        if ended := self._receiver.describe_end():
            raise StreamError(ended)

    def close(self) -> None:
        """Close the generator; items that were not read are dropped.

        Return at once. At the callee, the ``finally`` blocks of a generator run as soon as its running step yields;
        those of an asynchronous generator run at once. Their errors are logged at the callee. A second call, or one
        after the end, does nothing.
        """
        self._batch = iter(())
        self._receiver.close()

    async def aclose(self) -> None:
        """Close the generator, like `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        receiver: Receiver | None = getattr(self, "_receiver", None)
        if receiver is not None and not receiver.is_settled:
            receiver.worker.pool.submit(receiver.close)  # a finalizer must not send

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError: only the worker that has opened a stream can read it."""
        raise TypeError(
            f"cannot send {self._receiver}: only the worker that has opened a stream reads it. Send list(stream), or"
            " call rpc.stream on the worker that is to read; a generator function may pass the items on (yield from)"
        )

    def __repr__(self) -> str:
        return f"<{self._receiver}, {self._receiver.state}>"


async def _wait_until_set(event: asyncio.Event, timeout: int | None) -> bool:
    """Wait for an event; return False after a timeout in ns."""
    if timeout is None:
        return await event.wait()
    try:
        async with asyncio.timeout(timeout / 1e9):
            return await event.wait()
    except TimeoutError:
        return False


def open_stream(
    worker: Worker,
    to: int,
    function: Callable[..., object] | str,
    args: object,
    kwargs: object,
    timeout: float,
    prefetch: int,
    receiver: Any = None,
    introduce: bool = False,
) -> Stream[Any]:
    """Open a stream.

    Args:
        worker: The worker that reads.
        to: Id of the callee.
        function: The function; with a receiver, the name of a method.
        args: Its arguments.
        kwargs: Its keyword arguments.
        timeout: Limit in seconds for each wait; -1 is the worker's default, 0 no limit.
        prefetch: Most items ahead of the reader.
        receiver: Reference to the object of the method.
        introduce: The owner may not know the reference.

    Raises:
        ValueError: ``prefetch`` is no positive integer.
        SerializationError: An argument cannot be serialized.
        TelegradError: This worker is closed.
    """
    if type(prefetch) is not int or prefetch < 1:
        raise ValueError(f"prefetch is the number of items ahead of the reader, at least 1, and not {prefetch!r}")
    worker.require_open()
    positional, named = checked_arguments(args, kwargs)
    what: object = function
    if receiver is None:
        name = worker.calls.find_name(function)
        what = function if name is None else name[1]
    scope = current.get()
    # A request for items belongs to the context in which the stream was opened, whichever thread makes it.
    if scope is not None:  # without `_replace`, which takes a microsecond
        autograd = None if caller_flags() else scope.autograd
        depth = max(scope.depth, 1)
        connection, call, limits = scope.connection, scope.call, scope.limits_calls
        scope = Scope(worker, scope.deadline, depth, False, autograd, connection, call, limits_calls=limits)
    label = function if isinstance(function, str) else name_of(function)
    reader = Receiver(worker, to, label, worker.calls.timeout(timeout), prefetch, scope)
    stream: Stream[Any] = Stream(reader)  # closes the stream if a signal handler raises before the program gets it
    reader.open(what, tuple(positional), dict(named), receiver, introduce)
    return stream
