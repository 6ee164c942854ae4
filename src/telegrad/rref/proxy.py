"""Calls of a referenced value's methods, on its owner."""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from telegrad.errors import TelegradError, is_drop_in
from telegrad.rref.description import known_class
from telegrad.worker.calls.callables import read_with

if TYPE_CHECKING:
    from telegrad.rref.rref import RRef
    from telegrad.worker.calls.future import CallFuture

__all__ = ["UNSET", "RRefProxy"]

UNSET = -1.0

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_KINDS = {"rpc_sync": "sync", "rpc_async": "async", "call": "call", "remote": "remote"}


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
        rref = self._rref
        creation = rref._creation
        kind = None if creation is None else creation.made_class
        if kind is None and rref.is_owner():
            kind = known_class(rref)
        if kind is not None:
            _check_method(kind, name)
        return RemoteMethod(_CALLS[self._kind], rref, name, self._timeout)

    def __dir__(self) -> list[str]:
        """The methods of the value, where its class is known here."""
        kind = known_class(self._rref)
        if kind is None:
            return list(super().__dir__())
        return [name for name in dir(kind) if callable(getattr(kind, name, None))]

    def __repr__(self) -> str:
        return f"<methods of {self._rref!r}, by {self._kind}>"


class RemoteMethod(partial[R]):
    """A method of a referenced value, ready to be called. Any other use of it is an error that says how to read an
    attribute. (Under the drop-in it may be compared and is true, as torch's ``functools.partial`` objects.)"""

    def __repr__(self) -> str:
        rref, name, *_ = self.args
        return f"<remote {name!r} of {rref!r}, not called>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no attribute {name!r}: {_not_the_value(self)}")

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) if is_drop_in() else _refuse(self)

    def __hash__(self) -> int:
        return super().__hash__()

    def __bool__(self) -> bool:
        return True if is_drop_in() else _refuse(self)


def _refuse(method: RemoteMethod[Any], *_: object) -> NoReturn:
    raise TypeError(_not_the_value(method))


for _name in ("float", "int", "index", "len", "iter", "getitem", "contains", "lt", "le", "gt", "ge"):
    setattr(RemoteMethod, f"__{_name}__", _refuse)
for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(RemoteMethod, f"__{_name}__", _refuse)
    setattr(RemoteMethod, f"__r{_name}__", _refuse)


def _not_the_value(method: RemoteMethod[Any]) -> str:
    name = method.args[1]
    return f"this is the method {name!r} of a remote value, to be called. {read_with(name)}"


def _check_method(kind: type, name: str) -> None:
    """Raises of a property. Whether another attribute is callable is seen on the instance, by its owner."""
    found = getattr(kind, name, None)
    if isinstance(found, property) and not is_drop_in():
        raise AttributeError(f"{name!r} is a property of {kind.__qualname__}, not a method. {read_with(name)}")


def _sync(rref: "RRef[Any]", name: str, seconds: float, /, *args: Any, **kwargs: Any) -> Any:
    calls = rref.checked().calls
    timeout = calls.default_timeout if seconds == UNSET else calls.timeout(seconds)
    introduce = not rref._exists and rref.is_unknown()
    try:
        result = calls.client.call(rref.owner_id, name, args, kwargs, timeout, rref, introduce)
    except TelegradError as error:
        rref._exists |= isinstance(error, AttributeError)  # of the value, or of what its method does
        raise rref._on_notified(error)
    rref._exists = True
    return result


def _async(rref: "RRef[Any]", name: str, seconds: float, /, *args: Any, **kwargs: Any) -> "CallFuture[Any]":
    calls = rref.checked().calls
    introduce = not rref._exists and rref.is_unknown()
    future: CallFuture[Any] = calls.client.start(
        rref.owner_id, name, args, kwargs, calls.timeout(seconds), rref, introduce
    )
    return future


async def _call(rref: "RRef[Any]", name: str, seconds: float, /, *args: Any, **kwargs: Any) -> Any:
    return await _async(rref, name, seconds, *args, **kwargs)


def _remote(rref: "RRef[Any]", name: str, seconds: float, /, *args: Any, **kwargs: Any) -> "RRef[Any]":
    from telegrad.rref.create import create

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
    return create(rref.worker, rref.owner_id, name, args, kwargs, timeout, rref)


_CALLS: dict[str, Callable[..., Any]] = {"sync": _sync, "async": _async, "call": _call, "remote": _remote}
