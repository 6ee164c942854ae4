"""Calls of functions on other workers: `rpc_sync`, `rpc_async`, `call` and `remote`.

Type checkers know the result's type by the callable's return type. The overloads tell handlers whose result comes later
(``async def``, `async_execution`) from the others: their caller gets the value, not the coroutine or future.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias, TypeVar, overload

import torch

from telegrad.errors import NotInitialized, TelegradError
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.rref import RRef
from telegrad.rref.create import create, create_directly
from telegrad.serialize.tracebacks import without_own_frames
from telegrad.types import To
from telegrad.worker.arguments import checked_arguments
from telegrad.worker.default import current_worker, open_worker
from telegrad.worker.future import CallFuture, Deferred

__all__ = ["NOT_CALLABLE", "Args", "Kwargs", "call", "collect", "remote", "rpc_async", "rpc_sync"]

T = TypeVar("T")

Args: TypeAlias = tuple[Any, ...] | list[Any] | None
"""Positional arguments of a call."""

Kwargs: TypeAlias = dict[str, Any] | None
"""Keyword arguments of a call."""

NOT_CALLABLE = "function should be callable."

_thread_local_var = threading.local()
_collecting: set[int] = set()  # threads within _wait_all: a look at a thread's own variable costs more than most calls


@overload
def rpc_sync(
    to: To, func: Callable[..., Deferred[T]], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
) -> T: ...
@overload
def rpc_sync(to: To, func: Callable[..., T], args: Args = None, kwargs: Kwargs = None, timeout: float = ...) -> T: ...


def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run ``func(*args, **kwargs)`` on another worker and wait for the result.

    Args:
        to: a worker: its name, id or WorkerInfo. It may be this one.
        func: anything callable: functions, classes, methods, torch operators, scripted functions, lambdas. Its result
            is awaited there if it is an ``async def`` or under `telegrad.rpc.functions.async_execution`.
        args: its positional arguments, a tuple or list.
        kwargs: its keyword arguments.
        timeout: seconds; -1 is the worker's default, 0 no limit. Calls that ``func`` makes in turn end by then as well.

    Returns:
        The result; tensors are copies, which the caller owns.

    Raises:
        RuntimeError: there is no such worker, it is lost, or the time is over (`UnknownWorker`, `WorkerLost`,
            `RpcTimeout`); or this process has not joined a group (`NotInitialized`).
        SerializationError: an argument or the result cannot travel.
        what ``func`` raised: as an exception that is of the original type and of RemoteError.

    Example::

        total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1), timeout=5)
    """
    if not callable(func):
        raise TypeError(NOT_CALLABLE)
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    try:
        return worker.rpc_sync(to, func, args, kwargs, timeout)
    except Exception as error:
        raise without_own_frames(error)


@overload
def rpc_async(
    to: To, func: Callable[..., Deferred[T]], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
) -> CallFuture[T]: ...
@overload
def rpc_async(
    to: To, func: Callable[..., T], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
) -> CallFuture[T]: ...


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> CallFuture[Any]:
    """Start ``func(*args, **kwargs)`` on another worker; return its future.

    The request has left when this returns, so the arguments may be changed then.

    Args:
        to, func, args, kwargs, timeout: as of `rpc_sync`.

    Returns:
        A ``torch.futures.Future`` that can also be awaited. A failure that the program never looks at is logged.

    Raises:
        RuntimeError: there is no such worker, or this process has not joined a group. The future raises the rest.
        SerializationError: an argument cannot travel.

    Example::

        futures = [rpc.rpc_async(name, evaluate, args=(weights,)) for name in workers]
        scores = rpc.wait_all(futures)
    """
    if not callable(func):
        raise TypeError(NOT_CALLABLE)
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    try:
        future = worker.rpc_async(to, func, args, kwargs, timeout)
    except Exception as error:
        raise without_own_frames(error)
    if _collecting and threading.get_ident() in _collecting:
        _thread_local_var.future_list.append(future)
    return future


@overload
async def call(
    to: To, func: Callable[..., Deferred[T]], args: Args = None, kwargs: Kwargs = None, timeout: float = ...
) -> T: ...
@overload
async def call(to: To, func: Callable[..., T], args: Args = None, kwargs: Kwargs = None, timeout: float = ...) -> T: ...


async def call(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run ``func(*args, **kwargs)`` on another worker and await the result.

    This is `rpc_async` as a coroutine, for ``asyncio.create_task``, ``TaskGroup``, ``gather`` and ``wait_for``. Like
    any coroutine it starts when it is awaited or made a task; from then on it goes on without a thread of its own.
    Canceling the task ends the wait, not the function, whose result or error is dropped. Give a ``timeout`` where the
    callee is to know of a deadline.

    Args:
        to, func, args, kwargs, timeout: as of `rpc_sync`.

    Returns:
        The result; tensors are copies, which the caller owns.

    Raises:
        as `rpc_sync`, when awaited.

    Example::

        async with asyncio.TaskGroup() as group:
            for name in workers:
                group.create_task(rpc.call(name, evaluate, args=(weights,)))
    """
    try:
        return await rpc_async(to, func, args, kwargs, timeout)
    except Exception as error:
        raise without_own_frames(error)


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

    Returns at once; the reference may be used and sent on before there is a value.

    Args:
        to, func, args, kwargs: as of `rpc_sync`. A class makes an object there.
        timeout: seconds for ``func`` to return; -1 is the worker's default, 0 no limit.

    Returns:
        A reference to the result, which its owner, that worker, keeps as long as any worker refers to it.

    Raises:
        RuntimeError: there is no such worker, or this process has not joined a group. What becomes of the call itself
            is raised where the reference is used.
        SerializationError: an argument cannot travel.

    Example::

        model = rpc.remote("worker1", torch.nn.Linear, args=(20, 30))
        y = model.rpc_sync().forward(x)
    """
    if not callable(func):
        raise TypeError(NOT_CALLABLE)
    try:
        worker = open_worker()
        owner, local_id = worker.info_of(to).id, worker.references.new_id()
        handle = None
        if timeout == UNSET_RPC_TIMEOUT:
            handle = create_directly(worker, owner, local_id, func, args, kwargs)
        if handle is None:
            args, kwargs = checked_arguments(args, kwargs)
            handle = create(worker, owner, local_id, func, args, kwargs, worker.calls.timeout(timeout))
    except Exception as error:
        raise without_own_frames(error)
    return handle


def _not_in_scripts() -> NoReturn:
    raise TelegradError(
        "Remote calls from inside TorchScript are out of Telegrad's scope: make the call from Python. (Scripted"
        " functions and modules can be called remotely.)"
    )


for _function in (rpc_sync, rpc_async, remote):
    _function.__prepare_scriptable__ = _not_in_scripts  # type: ignore[union-attr]  # torch.jit.script asks for it


def collect(futures: list[CallFuture[Any]]) -> None:
    """Have these waited for at the end of `_wait_all`, if this thread is within one."""
    if _collecting and threading.get_ident() in _collecting:
        _thread_local_var.future_list.extend(futures)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait at the end for all calls that were begun with `rpc_async` within."""
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
