"""Results of handlers that are awaited.

These are coroutines, and futures of functions with the mark of `async_execution`.
"""

from collections.abc import Coroutine, Iterable
from types import CoroutineType
from typing import Any, TypeAlias

from torch.futures import Future

from telegrad.worker.calls.future import is_future

__all__ = ["DeferredResult", "deferred_result", "has_deferred_results", "mark_async"]

DeferredResult: TypeAlias = Coroutine[Any, Any, object] | Future[Any]

NOT_A_FUTURE = (
    "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got {}.{} from {}"
)

_ASYNC_MARK = "_wrapped_async_rpc_function"  # attribute that `async_execution` sets, as in torch


def mark_async(function: object) -> None:
    """Mark a function as one that returns a future to await."""
    setattr(function, _ASYNC_MARK, True)


def deferred_result(function: object, result: object) -> DeferredResult | None:
    """Return a result that has to be awaited, or None if it is a value.

    `is_deferred` in csrc/python/request.cc has the same rule.

    Args:
        function: The function that has returned the result.
        result: Its result.

    Raises:
        RuntimeError: The function should have returned a future.
    """
    if type(result) is CoroutineType:
        return result
    if not hasattr(function, _ASYNC_MARK):
        return None
    if is_future(result):
        return result
    kind = type(result)
    raise RuntimeError(NOT_A_FUTURE.format(kind.__module__, kind.__qualname__, function))


def has_deferred_results(function: object, results: Iterable[object]) -> bool:
    """Return whether some results of a function have to be awaited."""
    return hasattr(function, _ASYNC_MARK) or CoroutineType in map(type, results)
