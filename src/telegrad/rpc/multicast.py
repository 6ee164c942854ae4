"""Calls of a function on several workers at once."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from telegrad.errors import NotInitialized
from telegrad.rpc.calls import NOT_CALLABLE, Args, Kwargs, collect
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.types import To
from telegrad.worker.calls.callables import checked_arguments
from telegrad.worker.calls.future import CallFuture, Deferred
from telegrad.worker.calls.multicast import call_many
from telegrad.worker.default_worker import current_worker

__all__ = ["multicast"]

T = TypeVar("T")


@overload
def multicast(
    to: Iterable[To], func: Callable[..., Deferred[T]], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
) -> list[CallFuture[T]]: ...
@overload
def multicast(
    to: Iterable[To], func: Callable[..., T], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
) -> list[CallFuture[T]]: ...


def multicast(
    to: Iterable[To],
    func: Callable[..., object],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[CallFuture[Any]]:
    """Start ``func(*args, **kwargs)`` on several workers at once.

    The results are those of ``rpc_async`` for each worker, but the arguments are serialized once. Tensors of 256 KiB or
    more are stored once for all workers of this host, which map the same memory, so each further worker costs no copy.
    Every worker still gets its own tensors, and its writes to them are invisible to the others. A slow or failed worker
    affects only its own future.

    Args:
        to: the workers: names, ids or WorkerInfos, in any order. May contain this worker, and may be empty.
        func, args, kwargs, timeout: as of `rpc_async`; all may be changed as soon as this returns.

    Returns:
        The futures of the results, in the order of ``to``.

    Raises:
        RuntimeError: one of the workers does not exist (then no worker is called), or this one has not joined a group.
        SerializationError: an argument cannot be serialized.

    Example::

        def load_weights(weights):
            return weights["bias"].sum()

        weights = {"bias": torch.ones(1000)}
        futures = rpc.multicast(["worker1", "worker2"], load_weights, args=(weights,))
        rpc.wait_all(futures)
    """
    if not callable(func):
        raise TypeError(NOT_CALLABLE)
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    calls = worker.calls
    ns = calls.timeout(timeout)
    worker.require_open()
    peers = [worker.members.resolve(each).id for each in to]
    args, kwargs = checked_arguments(args, kwargs)
    futures = call_many(calls, peers, func, tuple(args), dict(kwargs), ns)
    collect(futures)
    return futures
