"""The callee's part of `telegrad.rpc.map`: run a chunk of items."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from inspect import CORO_CREATED, getcoroutinestate
from time import perf_counter_ns
from types import CoroutineType, MappingProxyType
from typing import Any, TypeAlias

from telegrad.rpc.cancellation import cancelled
from telegrad.rpc.copies import Copier
from telegrad.serialize.copies import IMMUTABLE
from telegrad.serialize.exceptions import pack_exception
from telegrad.serialize.program_pickler import Carried
from telegrad.worker import Worker, process_hooks
from telegrad.worker.calls.callables import callee_of, found, full_name_of, rerun_for_torch_error
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.future_waits import awaitable_of
from telegrad.worker.calls.interceptors import Find, Given, Shown, Split, around_handlers, carriers
from telegrad.worker.default_worker import open_worker
from telegrad.worker.serving.deferred_results import deferred_result, has_deferred_results

__all__ = ["Reply", "run_chunk"]

SLICE_TIME = 1_000_000  # ns between two checks for a cancellation; a check takes about a microsecond
GROWTH = 8  # most times that a slice has the items of the one before: the items may differ
MOST_IN_SLICE = 256  # for the same reason; slices then cost about 2 % of the throughput of the fastest functions

Reply: TypeAlias = tuple[list[Any], int | None, bytes | None]
"""Results before the first error; duration in ns, None if results were deferred; the packed error."""


def run_chunk(function: bytes | Callable[[Any], object], items: list[Any], caller: int) -> Any:
    """Run a function for each item, up to the first error.

    Stops early if the call is canceled: about once per `SLICE_TIME`, or after each item that takes longer.

    Args:
        function: The function's name in messages, or the function.
        items: The items.
        caller: Id of the calling worker.

    Returns:
        A `Reply`, or a coroutine of it if results are deferred.
    """
    worker = open_worker()
    run: Any = callee_of(function)
    results: list[Any] = []
    add, failure, copy, last = results.append, None, Copier(worker).copy, len(items) - 1
    immutable = IMMUTABLE
    size = 1  # of the next slice
    began = start = perf_counter_ns()
    while failure is None and (done := len(results)) < len(items):
        try:
            for item in items[done : done + size]:
                result = run(item)
                if type(result) not in immutable and len(results) < last:
                    result = copy(result)
                add(result)
            now = perf_counter_ns()
            size = min(GROWTH * size, MOST_IN_SLICE, max(size * SLICE_TIME // max(now - start, 1), 1))
            start = now
            if now - began >= SLICE_TIME and cancelled():
                break
        except BaseException as e:  # SystemExit too: the results before it are sent
            if process_hooks.forked:
                raise
            try:
                again, error = rerun_for_torch_error(run, (items[len(results)],), {}, e)
            except BaseException as raised:
                again, error = None, raised
            if error is None:
                add(copy(again))
            else:
                failure = _pack(worker, error, caller)
    duration = perf_counter_ns() - began
    if has_deferred_results(run, results):
        return _gather(worker, run, _DeferredResults(results), failure, caller)
    return results, duration, failure


class _DeferredResults(list[Any]):
    """Results of a function, some deferred."""

    def __del__(self) -> None:
        self.end_unawaited()  # of a chunk that was canceled before `_gather` began

    def end_unawaited(self) -> None:
        """End the results that are not awaited because the chunk was canceled."""
        for result in self:
            if type(result) is CoroutineType:
                if getcoroutinestate(result) == CORO_CREATED:
                    result.close()
            elif isinstance(result, CallFuture):
                result.cancel()


async def _gather(
    worker: Worker, function: object, deferred: _DeferredResults, failure: bytes | None, caller: int
) -> Reply:
    """Await deferred results, all at once."""
    worker.handlers.name_deferred(full_name_of(function))
    results: list[Any] = []
    try:
        copy = Copier(worker).copy
        settled = await asyncio.gather(*[_settled(function, result, copy) for result in deferred])
    finally:
        deferred.end_unawaited()  # now: the traceback of a cancellation refers to this frame
    for result, error in settled:
        if error is not None:
            return results, None, _pack(worker, error, caller)
        results.append(result)
    return results, None, failure


async def _settled(
    function: object, result: object, copy: Callable[[object], object]
) -> tuple[object, BaseException | None]:
    """Await a deferred result; return a copy of it, or its error."""
    try:
        deferred = deferred_result(function, result)
        if deferred is None:
            return result, None
        return copy(await (deferred if isinstance(deferred, Coroutine) else awaitable_of(deferred))), None
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the worker shuts down
            raise
        return None, RuntimeError(f"the handler was stopped: {e!r}")
    except BaseException as e:
        return None, e


def _pack(worker: Worker, error: BaseException, caller: int) -> bytes:
    """Log an error of an item, and return it as bytes."""
    worker.handlers.report(caller, error)
    packed = pack_exception(error, worker.info, worker.messages.gate)
    BaseException.with_traceback(error, None)
    return packed


class _ChunkCarrier:
    """Chunk as interceptors see it: a call of the function with the list of items."""

    kind = "map"
    paths: Mapping[str, str] = MappingProxyType({"args[1]": "args", "args[0]": "the function"})

    def show(self, args: Given, find: Find = found, /) -> Shown:
        function, items, _ = args
        return find(function), (items,), {}

    def change(
        self, args: Given, function: object, values: Sequence[object], named: Mapping[str, object], /
    ) -> tuple[object, ...]:
        if len(values) != 1 or named or not isinstance(values[0], list):
            raise ValueError(
                "an interceptor changed the arguments of a chunk of rpc.map to something else than (items,), a list"
            )
        return function, values[0], args[2]

    def split(self, args: Given, /) -> Split:
        function, items, caller = args
        return Carried((function,), (caller,), True), (items,), {}

    def is_reply(self, value: object, /) -> bool:
        return isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], list)


carriers[run_chunk] = _ChunkCarrier()
around_handlers.add(__file__)
