"""Calls of a referenced value's methods, on its owner."""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from telegrad.wire import Tag
from telegrad.worker.uses import NOT_MADE, run_method

if TYPE_CHECKING:
    from telegrad.rref.rref import RRef
    from telegrad.worker.future import CallFuture

__all__ = ["UNSET", "RRefProxy"]

UNSET = -1.0

R_co = TypeVar("R_co", covariant=True)

_KINDS = {"rpc_sync": "sync", "rpc_async": "async", "call": "call", "remote": "remote"}
_NO_KWARGS: dict[str, Any] = {}


class RRefProxy(Generic[R_co]):
    """An object whose attributes are functions that run the owner's methods; see `RRef.rpc_sync`.

    Generic in what the functions return: the result, a `CallFuture`, a coroutine or an `RRef`.

    Args:
        rref: refers to the value.
        kind: "sync", "async", "call" or "remote"; or, as in torch, ``rpc_sync``, ``rpc_async`` or ``remote`` itself.
        timeout: seconds; -1 is the default of the worker.
    """

    __slots__ = ("_kind", "_rref", "_timeout")

    def __init__(self, rref: "RRef[Any]", kind: str | Callable[..., Any], timeout: float = UNSET) -> None:
        self._rref = rref
        self._kind = kind if type(kind) is str else _KINDS[kind.__name__]  # type: ignore[union-attr]
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., R_co]:
        return partial(_CALLS[self._kind], self._rref, name, self._timeout)


def _sync(rref: "RRef[Any]", name: str, seconds: float, /, *args: Any, **kwargs: Any) -> Any:
    worker = rref.checked()
    calls = worker.calls
    timeout = calls.default_timeout if seconds == UNSET else calls.timeout(seconds)
    if rref._exists and rref.owner_id != worker.info.id:
        created_on, local_id = rref.id
        use = (created_on, local_id, name, args, kwargs)
        result = calls.call(rref.owner_id, run_method, use, _NO_KWARGS, timeout, name)
        if result is not NOT_MADE:
            return result
    try:
        result = calls.sync(_request(rref, name, timeout, args, kwargs, "sync"))
    except AttributeError:  # of the value, or of what its method does
        rref._exists = True
        raise
    rref._exists = True
    return result


def _async(rref: "RRef[Any]", name: str, seconds: float, /, *args: Any, **kwargs: Any) -> "CallFuture[Any]":
    calls = rref.checked().calls
    return calls.start(_request(rref, name, calls.timeout(seconds), args, kwargs, "async"))


async def _call(rref: "RRef[Any]", name: str, seconds: float, /, *args: Any, **kwargs: Any) -> Any:
    return await _async(rref, name, seconds, *args, **kwargs)


def _remote(rref: "RRef[Any]", name: str, seconds: float, /, *args: Any, **kwargs: Any) -> "RRef[Any]":
    from telegrad.rref.create import create_by_method

    timeout = rref.checked().calls.timeout(seconds)
    start = time.monotonic_ns()
    # Whoever gives it a time hears here, as in torch, that the value has not been made within it.
    kind = rref._get_type(seconds) if seconds not in (UNSET, 0) else rref._known_type()
    if kind is not None:
        # As in torch, a method that does not exist is an error here and now; of a value that is still being made, the
        # reference made here says so when it is used.
        if not issubclass(kind, torch.jit.ScriptModule):
            getattr(kind, name)
        if timeout:
            timeout = max(timeout - (time.monotonic_ns() - start), 1)
    return create_by_method(rref, name, args, kwargs, timeout)


_CALLS: dict[str, Callable[..., Any]] = {"sync": _sync, "async": _async, "call": _call, "remote": _remote}


def _request(rref: "RRef[Any]", name: str, timeout: int, args: Any, kwargs: Any, mode: str) -> Any:
    return rref._request(Tag.METHOD, timeout, name, method=name, body=(args, kwargs), mode=mode)
