"""Calls of a function for each item of an iterable, many items per message."""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from contextlib import suppress
from itertools import starmap
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar, overload

import torch

from telegrad.errors import NotInitialized, RemoteError, RpcTimeout, TelegradError, WorkerLost
from telegrad.rpc.calls import NOT_CALLABLE
from telegrad.rpc.chunks import Reply, run_chunk
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.rpc.copies import Copier
from telegrad.rpc.map_callee import CHUNK_BYTES, Callee
from telegrad.rpc.map_items import Source
from telegrad.rpc.progress import find_bar
from telegrad.serialize.exceptions import unpack_exception
from telegrad.serialize.function_names import NotByName
from telegrad.serialize.tracebacks import is_of_signal_handler, strip_own_frames
from telegrad.streams.read_errors import not_an_end
from telegrad.types import To, WorkerInfo
from telegrad.waits import SIGNAL_CHECK_INTERVAL
from telegrad.worker import Worker
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.callables import name_of
from telegrad.worker.calls.future import CallFuture, Deferred
from telegrad.worker.calls.retry_policy import Retry, require_retry
from telegrad.worker.calls.retrying import start_retrying
from telegrad.worker.default_worker import current_worker

__all__ = ["map"]

A = TypeVar("A")
T = TypeVar("T")

IN_FLIGHT = 2  # chunks per worker: it runs one while the other travels
REORDER = 4  # times `in_flight` chunks that wait for one before them, if there are several workers

_RUN_CHUNK = name_of(run_chunk)  # in error texts
_add_done_callback = torch._C.Future.add_done_callback  # bypasses the count of the program's callbacks

Workers: TypeAlias = To | Sequence[To]


@overload
def map(
    workers: Workers,
    func: Callable[[A], Deferred[T]],
    items: Iterable[A],
    *,
    chunk: int | None = ...,
    in_flight: int | None = ...,
    ordered: bool = ...,
    timeout: float = ...,
    retry: Retry | None = ...,
    progress: bool = ...,
) -> Generator[T, None, None]: ...
@overload
def map(
    workers: Workers,
    func: Callable[[A], T],
    items: Iterable[A],
    *,
    chunk: int | None = ...,
    in_flight: int | None = ...,
    ordered: bool = ...,
    timeout: float = ...,
    retry: Retry | None = ...,
    progress: bool = ...,
) -> Generator[T, None, None]: ...


def map(
    workers: Workers,
    func: Callable[[Any], object],
    items: Iterable[Any],
    *,
    chunk: int | None = None,
    in_flight: int | None = None,
    ordered: bool = True,
    timeout: float = UNSET_RPC_TIMEOUT,
    retry: Retry | None = None,
    progress: bool = False,
) -> Generator[Any, None, None]:
    """Run ``func(item)`` on other workers for each item, and iterate over the results.

    Many small calls travel as one message, without a future each. The iterator takes items as it needs them, so the
    items may be an endless generator: if the program stops iterating, no further item is taken or sent. Closing the
    iterator, an error and a timeout cancel the chunks in flight: the workers run no further item of them, and ``func``
    may ask `telegrad.rpc.cancelled`.

    Args:
        workers: a worker (name, id or WorkerInfo), or a sequence of workers that share the items.
        func: any callable of one argument. The results of an ``async def`` and of functions under
            `telegrad.rpc.functions.async_execution` are awaited, those of a chunk at once.
        items: its arguments; any iterable, taken lazily in the calling thread.
        chunk: number of items per message. By default it adapts to the time that ``func`` takes, for about 1.5 ms and
            at most 4 MiB per message; up to 64 items if the results are awaited.
        in_flight: number of chunks that each worker has at a time, 2 by default. Chunks of one worker run on different
            threads, so more of them help if ``func`` waits or releases the GIL.
        ordered: yield results in the order of the items. With False, as chunks are completed.
        timeout: limit in seconds for each chunk, its time in the worker's queue included; -1 is the worker's default,
            0 no limit.
        retry: sends a chunk again because its worker is lost: at once to another worker, or if none is left to the same
            one, after the pauses of the `telegrad.rpc.Retry`; and because ``func`` has raised an error that its `on`
            covers. The worker may have run some of the items, so ``func`` must be idempotent.
        progress: show a progress bar, with the package ``rich`` or else ``tqdm``.

    Returns:
        A generator of the results. Like every generator, it must be used by one thread at a time.

    Raises:
        ValueError, TypeError: an argument is invalid: no workers, a chunk that is not positive, a negative timeout,
            items that are not iterable.
        RuntimeError: a worker does not exist, or this process has not joined a group (`NotInitialized`).
        ImportError: ``progress`` needs a package that is not installed.
        exceptions of ``func``, while iterating: after the results of the items before, with the item's index in a note;
            of their original type and of RemoteError. The remaining items are dropped. The same applies to an
            exception of ``items``, to an item that cannot be sent, and to `WorkerLost` and `RpcTimeout`, whose note has
            the indices of the chunk.

    Example::

        def square(x):
            return x * x

        print(sum(rpc.map(["worker1", "worker2"], square, range(1000))))  # 332833500
    """
    if not callable(func):
        raise TypeError(NOT_CALLABLE)
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    worker.require_open()
    for name, value, least in (("chunk", chunk, 1), ("in_flight", in_flight, 1)):
        if value is not None:
            _check_integer(name, value, least)
    if retry is not None:
        require_retry(retry)
    worker.calls.timeout(timeout)
    many = [workers] if isinstance(workers, (str, int, WorkerInfo)) else list(workers)
    if not many:
        raise ValueError("rpc.map needs at least one worker: pass a worker, or a sequence of workers")
    find = worker.members.resolve if retry is None else worker.members.resolve_any
    callees = [Callee(info) for info in {i.id: i for i in (find(to) for to in many)}.values()]
    source = Source(items, Copier(worker).copy)
    bar = find_bar() if progress else None
    results = _Mapping(worker, callees, func, source, chunk, in_flight or IN_FLIGHT, ordered, timeout, retry).results()
    return results if bar is None else bar(results, len(items) if isinstance(items, Sized) else None)


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} of rpc.map has to be an integer of at least {least}, and is {value!r}")


def _check_thread() -> None:
    check_blocking("next() of rpc.map", "`asyncio.to_thread(list, rpc.map(...))`")


class _Chunk:
    """Some consecutive items, and the call that runs them."""

    def __init__(self, start: int, items: list[Any], retries: int) -> None:
        self.start = start
        self.items = items
        self.retries = retries  # left
        self.callee: Callee | None = None  # while the call is running
        self.future: CallFuture[Reply] | None = None
        self.unsent: Exception | None = None  # why there is no call

    def done(self) -> bool:
        """Return whether the end of the call has been processed.

        Until then the chunk may be sent again.
        """
        return self.callee is None

    def describe(self, label: str) -> str:
        """Return a text for people.

        Args:
            label: Name of the function.
        """
        count = len(self.items)
        return f"{label} (a chunk of rpc.map with {count} {'item' if count == 1 else 'items'})"

    def noted(self, error: BaseException, label: str) -> BaseException:
        """Add the indices of the items to an error of the whole chunk."""
        last = self.start + len(self.items) - 1
        where = f"item {last}" if last == self.start else f"items {self.start} to {last}"
        error.add_note(f"in rpc.map of {label}, at {where}")
        if isinstance(error, TelegradError) and not isinstance(error, RemoteError):
            text = self.describe(label)
            error.args = tuple(_renamed(each, text) for each in error.args)
            if isinstance(error, RpcTimeout):
                error.call = _renamed(error.call, text)
        return error


class _Mapping:
    """Chunks in flight, and the order of their results."""

    def __init__(
        self,
        worker: Worker,
        callees: list[Callee],
        function: Callable[[Any], object],
        source: Source,
        size: int | None,
        in_flight: int,
        ordered: bool,
        timeout: float,
        retry: Retry | None,
    ) -> None:
        self._worker = worker
        self._callees = callees
        self._function: object = function
        self._label = name_of(function)
        self._source = source
        self._size = size
        self._in_flight = in_flight
        self._ordered = ordered
        self._timeout = timeout
        self._retry = retry
        self._pending: list[_Chunk] = []  # with results that have not been yielded, in the order of the items
        self._completed: SimpleQueue[None] = SimpleQueue()  # an entry for each completion, if not ordered
        try:
            self._function = worker.calls.names.find(function)[1]
        except NotByName:
            pass

    def results(self) -> Generator[Any, None, None]:
        """Yield all results, then raise what ended them early."""
        try:
            _check_thread()  # before an item is taken
            self._fill()
            while self._pending:
                chunk = self._next_done()
                values, failure = self._take(chunk)
                if failure is None:
                    self._fill()  # the workers run the next chunks while the program uses these results
                yield from values
                if failure is not None:
                    raise not_an_end(failure, self._label) if isinstance(failure, StopIteration) else failure
            if self._source.error is not None:
                raise self._source.error
        except Exception as error:
            raise strip_own_frames(error)
        finally:
            futures = [chunk.future for chunk in self._pending if chunk.future is not None]
            for future in futures:
                future._mark_read()
            if futures and not self._worker.closed:
                self._worker.pool.submit(_cancel, futures)  # this may be a finalizer, which must not send

    # ---- sending

    def _fill(self) -> None:
        """Send chunks until every worker has enough, or there are no more items."""
        self._settle()
        source = self._source
        alive = [callee for callee in self._callees if not callee.lost]
        most = self._in_flight * len(alive) * (REORDER if self._ordered and len(alive) > 1 else 1)
        while not source.ended and len(self._pending) < most:
            callee = self._freest()
            if callee is None or callee.running >= self._in_flight:
                break
            start = source.taken
            items = source.take(self._size or callee.size, None if self._size else CHUNK_BYTES)
            if items:
                self._send(_Chunk(start, items, self._retry.attempts - 1 if self._retry else 0), callee)

    def _freest(self) -> Callee | None:
        return min((each for each in self._callees if not each.lost), key=lambda each: each.running, default=None)

    def _send(self, chunk: _Chunk, callee: Callee) -> None:
        """Send a chunk, up to the first item that cannot be sent."""
        try:
            self._start(chunk, callee)
            self._pending.append(chunk)
        except BaseException as error:
            if chunk.future is not None:
                chunk.future._abandon()
            if _is_loss(error) and chunk.retries and self._retry is not None and self._retry.covers(error):
                callee.lost = True
                self._pending.append(chunk)
                self._move(chunk, callee)
                return
            if not isinstance(error, Exception) or is_of_signal_handler(error):
                raise
            if len(chunk.items) == 1 or isinstance(error, NotInitialized):
                chunk.unsent = error
                self._source.ended, self._source.error = True, None
                self._pending.append(chunk)
                return
            half = len(chunk.items) // 2
            self._send(_Chunk(chunk.start, chunk.items[:half], chunk.retries), callee)
            if self._pending[-1].unsent is None:
                self._send(_Chunk(chunk.start + half, chunk.items[half:], chunk.retries), callee)

    def _start(self, chunk: _Chunk, callee: Callee) -> None:
        calls, arguments = self._worker.calls, (self._function, chunk.items, self._worker.info.id)
        call = (callee.info.id, run_chunk, arguments, None, calls.timeout(self._timeout))
        sent: list[CallFuture[Reply]] = []
        try:
            sent.extend(starmap(calls.client.start, (call,)))  # has the future before a signal handler can run
            sent[0]._set_request((callee.info.id, chunk.describe(self._label), call[-1]))
            self._follow(chunk, callee, sent[0])
        except BaseException:
            for future in sent:
                future._abandon()
            raise

    def _follow(self, chunk: _Chunk, callee: Callee, future: CallFuture[Reply]) -> None:
        chunk.future = future
        chunk.callee = callee
        callee.running += 1
        if not self._ordered:
            _add_done_callback(chunk.future, lambda _: self._completed.put(None))

    def _send_again(self, chunk: _Chunk, callee: Callee, attempts: int) -> None:
        """Send a chunk to its worker again after a pause, more often if it stays lost."""
        assert self._retry is not None
        pause = self._retry.pause(self._retry.attempts - chunk.retries)
        retry = dataclasses.replace(self._retry, attempts=attempts)
        chunk.retries -= attempts
        arguments = (self._function, chunk.items, self._worker.info.id)
        future = start_retrying(
            self._worker, callee.info.name, run_chunk, arguments, None, self._timeout, retry, once=False, pause=pause
        )
        self._follow(chunk, callee, future)

    # ---- completions

    def _next_done(self) -> _Chunk:
        """Wait for the chunk whose results come next, and remove it."""
        _check_thread()
        while True:
            self._settle()
            for index, chunk in enumerate(self._pending[:1] if self._ordered else self._pending):
                if chunk.done():
                    return self._pending.pop(index)
            if self._ordered:
                future = self._pending[0].future
                assert future is not None
                try:
                    future.wait()  # this thread polls the network
                except Exception as error:
                    failure = future.failure() if future.done() else None
                    if type(failure) is not type(error):  # raised by a signal handler, or the worker has closed
                        raise
            else:
                with suppress(Empty):
                    self._completed.get(timeout=SIGNAL_CHECK_INTERVAL)

    def _settle(self) -> None:
        """Process completions; send chunks of lost workers again."""
        for chunk in self._pending:
            callee, future = chunk.callee, chunk.future
            if callee is None or future is None or not future.done():
                continue
            callee.running -= 1
            chunk.callee = None
            error = future.failure()
            if error is None:
                callee.lost = False  # it may have come back
                callee.adapt(future.value())
                packed = future.value()[2] if chunk.retries else None
                if packed is not None and self._retry is not None:
                    error = unpack_exception(packed, self._worker.messages.gate)
                    if self._retry.covers(error):  # raised by the function
                        self._send_again(chunk, callee, 1)
                continue
            if _is_loss(error):
                callee.lost = True
            if not chunk.retries or self._retry is None or not self._retry.covers(error):
                continue
            future._mark_read()
            self._move(chunk, callee)

    def _move(self, chunk: _Chunk, callee: Callee) -> None:
        """Send a chunk of a lost worker to another one.

        Without another one, it is sent to the same one later.
        """
        while chunk.retries:
            other = self._freest()
            if other is None:
                self._send_again(chunk, callee, chunk.retries)
                return
            chunk.retries -= 1
            try:
                self._start(chunk, other)
            except WorkerLost as error:
                other.lost = True
                if not chunk.retries:
                    chunk.future, chunk.unsent = None, error
            else:
                return

    def _take(self, chunk: _Chunk) -> tuple[list[Any], BaseException | None]:
        """Return the results of a chunk that is done, and the error that ended it early."""
        if chunk.future is None:
            assert chunk.unsent is not None
            return [], chunk.noted(chunk.unsent, self._label)
        try:
            values, _, packed = chunk.future.value()
        except Exception as error:
            return [], chunk.noted(error, self._label)
        if packed is None and len(values) != len(chunk.items):
            raise TelegradError(
                f"rpc.map of {self._label} got {len(values)} results for the {len(chunk.items)} items from"
                f" {chunk.start} on. If an interceptor changes results of `map`, it has to keep their number."
            )
        if packed is None:
            return values, None
        failure = unpack_exception(packed, self._worker.messages.gate)
        failure.add_note(f"in rpc.map of {self._label}, at item {chunk.start + len(values)}")
        return values, failure


def _is_loss(error: BaseException) -> bool:
    """Return whether the worker of a call is lost, or has left."""
    return isinstance(error, WorkerLost) and not isinstance(error, RemoteError)


def _renamed(text: Any, name: str) -> Any:
    """Replace the name of Telegrad's own function in a text of an error."""
    return text.replace(_RUN_CHUNK, name) if isinstance(text, str) else text


def _cancel(futures: list[CallFuture[Reply]]) -> None:
    for future in futures:
        future.cancel()
