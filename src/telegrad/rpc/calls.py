"""Remote function calls: `rpc_sync`, `rpc_async`, `call` and `remote`.

Type checkers derive the result's type from the callable's return type. The overloads distinguish handlers with a
deferred result (``async def``, `async_execution`): their caller gets the value, not the coroutine or future.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias, TypeVar, overload

import torch

from telegrad.errors import NotInitialized, TelegradError
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.rref import RRef
from telegrad.rref.create import create
from telegrad.serialize.tracebacks import strip_own_frames
from telegrad.types import To
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.future import CallFuture, Deferred, cancel_if_interrupted
from telegrad.worker.calls.retry_policy import Retry
from telegrad.worker.calls.retrying import start_retrying
from telegrad.worker.default_worker import current_worker, open_worker

__all__ = ["NOT_CALLABLE", "Args", "Kwargs", "call", "collect", "remote", "rpc_async", "rpc_sync"]

T = TypeVar("T")

Args: TypeAlias = tuple[Any, ...] | list[Any] | None
"""Positional arguments of a call."""

Kwargs: TypeAlias = dict[str, Any] | None
"""Keyword arguments of a call."""

NOT_CALLABLE = "function should be callable."

_thread_local_var = threading.local()
_collecting: set[int] = set()  # ids of threads within _wait_all; a set, because reading a thread-local costs more


@overload
def rpc_sync(
    to: To,
    func: Callable[..., Deferred[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
    retry: Retry | None = ...,
) -> T: ...
@overload
def rpc_sync(
    to: To,
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
    retry: Retry | None = ...,
) -> T: ...


def rpc_sync(
    to: To,
    func: Callable[..., object],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    retry: Retry | None = None,
) -> Any:
    """Run ``func(*args, **kwargs)`` on another worker and wait for the result.

    Args:
        to: a worker: its name, id or WorkerInfo. It may be this one.
        func: any callable: function, class, method, torch operator, scripted function or lambda. The callee awaits the
            result of an ``async def`` and of functions under `telegrad.rpc.functions.async_execution`.
        args: its positional arguments, a tuple or list.
        kwargs: its keyword arguments.
        timeout: seconds; -1 is the worker's default, 0 no limit. Nested calls of ``func`` end by the same deadline.
        retry: makes the call again if the worker is lost, within ``timeout``; for idempotent functions. The arguments
            have to stay unchanged until the call ends.

    Returns:
        The result; its tensors are copies, which the caller owns.

    Raises:
        RuntimeError: there is no such worker, it is lost, or the timeout has expired (`UnknownWorker`, `WorkerLost`,
            `RpcTimeout`); a limit is reached (`Overloaded`, `MessageTooLarge`, `ReceiverOutOfMemory`); the worker does
            not expose ``func`` (`NotExposed`); or this process has not joined a group (`NotInitialized`).
        SerializationError: an argument or the result cannot be serialized.
        TypeError: ``func`` is not callable, ``args`` is no tuple or list, ``kwargs`` no dict, ``timeout`` no number, or
            ``retry`` no Retry.
        ValueError: ``to`` is no name, id or WorkerInfo, or ``timeout`` is negative and not -1.
        exceptions of ``func``: of their original type and of RemoteError.

    Example::

        total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1), timeout=5)
    """
    if not callable(func):
        raise TypeError(NOT_CALLABLE)
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    try:
        if retry is not None:
            check_blocking()  # before the call is sent
            future = start_retrying(worker, to, func, args, kwargs, timeout, retry)
            with cancel_if_interrupted(future):
                return future.wait()
        return worker.rpc_sync(to, func, args, kwargs, timeout)
    except Exception as error:
        raise strip_own_frames(error)


@overload
def rpc_async(
    to: To,
    func: Callable[..., Deferred[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
    retry: Retry | None = ...,
) -> CallFuture[T]: ...
@overload
def rpc_async(
    to: To,
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
    retry: Retry | None = ...,
) -> CallFuture[T]: ...


def rpc_async(
    to: To,
    func: Callable[..., object],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    retry: Retry | None = None,
) -> CallFuture[Any]:
    """Start ``func(*args, **kwargs)`` on another worker and return its future.

    The arguments may be changed afterwards, unless there is a ``retry``. Over TCP, if the connection breaks before a
    tensor of more than 64 KiB has arrived, and it was changed, the call fails with WorkerLost.

    Args:
        to, func, args, kwargs, timeout, retry: as of `rpc_sync`.

    Returns:
        A ``torch.futures.Future`` that can also be awaited. A failure that the program never reads is logged.

    Raises:
        RuntimeError: there is no such worker, or this process has not joined a group. The future raises the rest.
        SerializationError: an argument cannot be serialized.
        TypeError, ValueError: as of `rpc_sync`.

    Example::

        futures = [rpc.rpc_async(name, torch.add, args=(torch.ones(2), 1)) for name in ("worker1", "worker2")]
        sums = rpc.wait_all(futures)
    """
    if not callable(func):
        raise TypeError(NOT_CALLABLE)
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    try:
        if retry is None:
            future = worker.rpc_async(to, func, args, kwargs, timeout)
        else:
            future = start_retrying(worker, to, func, args, kwargs, timeout, retry)
    except Exception as error:
        raise strip_own_frames(error)
    if _collecting and threading.get_ident() in _collecting:
        _thread_local_var.future_list.append(future)
    return future


@overload
async def call(
    to: To,
    func: Callable[..., Deferred[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
    retry: Retry | None = ...,
) -> T: ...
@overload
async def call(
    to: To,
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = ...,
    retry: Retry | None = ...,
) -> T: ...


async def call(
    to: To,
    func: Callable[..., object],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    retry: Retry | None = None,
) -> Any:
    """Run ``func(*args, **kwargs)`` on another worker and await the result.

    This is `rpc_async` as a coroutine, for ``asyncio.create_task``, ``TaskGroup``, ``gather`` and ``wait_for``. Like
    any coroutine, it starts when it is awaited or made a task; from then on it needs no thread. Canceling the task also
    cancels the call, as `CallFuture.cancel` does. Pass a ``timeout`` if the callee should know the deadline.

    Args:
        to, func, args, kwargs, timeout, retry: as of `rpc_sync`.

    Returns:
        The result; its tensors are copies, which the caller owns.

    Raises:
        as `rpc_sync`, when awaited.

    Example::

        async with asyncio.TaskGroup() as group:
            for name in ("worker1", "worker2"):
                group.create_task(rpc.call(name, torch.add, args=(torch.ones(2), 1)))
    """
    try:
        return await rpc_async(to, func, args, kwargs, timeout, retry)
    except Exception as error:
        raise strip_own_frames(error)


@overload
def remote(
    to: To, func: Callable[..., Deferred[T]], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
) -> RRef[T]: ...
@overload
def remote(
    to: To, func: Callable[..., T], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
) -> RRef[T]: ...


def remote(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run ``func(*args, **kwargs)`` on another worker, which keeps the result.

    Return at once. The reference may be used and sent on before the value exists.

    Args:
        to, func, args, kwargs: as of `rpc_sync`. A class creates an object on that worker.
        timeout: limit in seconds for ``func``; -1 is the worker's default, 0 no limit.

    Returns:
        A reference to the result. That worker owns the result, and keeps it as long as any worker refers to it.

    Raises:
        RuntimeError: there is no such worker, or this process has not joined a group. Using the reference raises the
            errors of the call itself.
        SerializationError: an argument cannot be serialized.
        TypeError, ValueError: as of `rpc_sync`.

    Example::

        layer = rpc.remote("worker1", torch.nn.Linear, args=(3, 1))  # returns at once
        y = layer.rpc_sync().forward(torch.ones(3))
    """
    if not callable(func):
        raise TypeError(NOT_CALLABLE)
    try:
        worker = open_worker()
        calls = worker.calls
        within = calls.default_timeout if timeout == UNSET_RPC_TIMEOUT else calls.timeout(timeout)
        return create(RRef, worker, worker.members.resolve(to).id, func, args, kwargs, within)
    except Exception as error:
        raise strip_own_frames(error)


def _not_in_scripts() -> NoReturn:
    raise TelegradError(
        "Remote calls from inside TorchScript are out of Telegrad's scope: make the call from Python. (Scripted"
        " functions and modules can be called remotely.)"
    )


for _function in (rpc_sync, rpc_async, remote):
    _function.__prepare_scriptable__ = _not_in_scripts  # type: ignore[union-attr]  # torch.jit.script asks for it


def collect(futures: list[CallFuture[Any]]) -> None:
    """Register futures for the wait at the end of `_wait_all`, if in one."""
    if _collecting and threading.get_ident() in _collecting:
        _thread_local_var.future_list.extend(futures)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait at the end for all `rpc_async` calls started inside the block."""
    _thread_local_var.future_list = []
    _collecting.add(threading.get_ident())
    try:
        yield
    finally:
        _collecting.discard(threading.get_ident())
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list
