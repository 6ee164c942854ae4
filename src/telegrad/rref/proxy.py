"""Proxies of a referenced value: its methods run on the owner."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import torch

from telegrad.errors import SerializationError, TelegradError, is_drop_in
from telegrad.rref.description import known_class
from telegrad.rref.handle import AnyHandle
from telegrad.rref.value_type import UNSET, method_type
from telegrad.streams.stream import Stream, open_stream
from telegrad.worker.calls.callables import read_with
from telegrad.worker.calls.future import CallFuture

__all__ = ["UNSET", "RRefProxy", "stream_method"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_KINDS = {"rpc_sync": "sync", "rpc_async": "async", "call": "call", "remote": "remote", "stream": "stream"}


class RRefProxy(Generic[R_co]):
    """Object with attributes that run methods of a value on its owner.

    See `RRef.rpc_sync`. Generic in the result of the functions: the value, a `CallFuture`, a coroutine, an `RRef` or a
    `Stream`.

    Args:
        rref: Refers to the value.
        kind: "sync", "async", "call", "remote" or "stream"; or, as in torch, ``rpc_sync``, ``rpc_async`` or ``remote``
            itself.
        timeout: Limit in seconds; -1 is the default of the worker.
        run: Runs a method, for a kind with further options.
    """

    __slots__ = ("__kind", "__rref", "__run", "__timeout")  # mangled: any other name may be a method of the value

    def __init__(
        self,
        rref: AnyHandle,
        kind: str | Callable[..., object],
        timeout: float = UNSET,
        run: Callable[..., Any] | None = None,
    ) -> None:
        self.__rref = rref
        self.__run = run
        self.__kind = kind if isinstance(kind, str) else _KINDS[kind.__name__]
        self.__timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., R_co]:
        # "__dict__" is read by Dynamo; the slots are missing if the constructor has not run.
        if name == "__dict__" or name.startswith("_RRefProxy__"):
            raise AttributeError(name)
        rref = self.__rref
        creation = rref._creation
        kind = None if creation is None else creation.value_class
        if kind is None and rref.is_owner():
            kind = known_class(rref)
        if kind is not None:
            _check_method(kind, name)
        return RemoteMethod(self.__run or _CALLS[self.__kind], rref, name, self.__timeout)

    def __dir__(self) -> list[str]:
        """Return the methods of the value if this worker knows its class."""
        kind = known_class(self.__rref)
        if kind is None:
            return list(super().__dir__())
        return [name for name in dir(kind) if callable(getattr(kind, name, None))]

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            f"{self!r} cannot be sent, copied or pickled. Send the RRef, and use its proxy where it arrives."
        )

    def __repr__(self) -> str:
        return f"<methods of {self.__rref!r}, by {self.__kind}>"


class RemoteMethod(partial[R]):
    """A method of a referenced value, ready to be called.

    Any other use raises an error with a hint how to read an attribute. (Under the drop-in it may be compared and is
    true, like torch's ``functools.partial`` objects.)
    """

    def __repr__(self) -> str:
        rref, name, *_ = self.args
        return f"<remote {name!r} of {rref!r}, not called>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no attribute {name!r}: {_hint(self)}")

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) if is_drop_in() else _raise_no_value(self)

    def __hash__(self) -> int:
        return super().__hash__()

    def __bool__(self) -> bool:
        return True if is_drop_in() else _raise_no_value(self)


def _raise_no_value(method: partial[R], *_: object) -> NoReturn:
    raise TypeError(_hint(method))


for _name in ("float", "int", "index", "len", "iter", "getitem", "contains", "lt", "le", "gt", "ge"):
    setattr(RemoteMethod, f"__{_name}__", _raise_no_value)
for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(RemoteMethod, f"__{_name}__", _raise_no_value)
    setattr(RemoteMethod, f"__r{_name}__", _raise_no_value)


def _hint(method: partial[R]) -> str:
    name = method.args[1]
    return f"this is the method {name!r} of a remote value, to be called. {read_with(name)}"


def _check_method(kind: type, name: str) -> None:
    """Raise an error for a property; the owner checks other attributes."""
    found = getattr(kind, name, None)
    if isinstance(found, property) and not is_drop_in():
        raise AttributeError(f"{name!r} is a property of {kind.__qualname__}, not a method. {read_with(name)}")


def _sync(rref: AnyHandle, name: str, seconds: float, /, *args: object, **kwargs: object) -> Any:
    calls = rref._usable_worker().calls
    timeout = calls.default_timeout if seconds == UNSET else calls.timeout(seconds)
    introduce = not rref._is_created and rref.is_unknown()
    try:
        result = calls.client.call(rref.owner_id, name, args, kwargs, timeout, rref, introduce)
    except TelegradError as error:
        rref._is_created |= isinstance(error, AttributeError)  # the value exists: it, or its method, raised
        raise rref._on_error(error)
    rref._is_created = True
    return result


def _async(rref: AnyHandle, name: str, seconds: float, /, *args: object, **kwargs: object) -> CallFuture[Any]:
    calls = rref._usable_worker().calls
    introduce = not rref._is_created and rref.is_unknown()
    future: CallFuture[Any] = calls.client.start(
        rref.owner_id, name, args, kwargs, calls.timeout(seconds), rref, introduce
    )
    return future


async def _call(rref: AnyHandle, name: str, seconds: float, /, *args: object, **kwargs: object) -> object:
    return await _async(rref, name, seconds, *args, **kwargs)


def _remote(rref: AnyHandle, name: str, seconds: float, /, *args: object, **kwargs: object) -> AnyHandle:
    timeout = rref._usable_worker().calls.timeout(seconds)
    start = time.monotonic_ns()
    # As in torch, a missing method raises at once if the value exists; with a timeout, the call waits for the value
    # that long. Otherwise uses of the new reference raise.
    kind = method_type(rref, seconds)
    if kind is not None:
        if not issubclass(kind, torch.jit.ScriptModule):
            getattr(kind, name)
        if timeout:
            timeout = max(timeout - (time.monotonic_ns() - start), 1)
    return rref._create(name, args, kwargs, timeout)


def stream_method(
    prefetch: int, rref: AnyHandle, name: str, seconds: float, /, *args: object, **kwargs: object
) -> Stream[Any]:
    """Open a stream of a method's items.

    Args:
        prefetch: Most items ahead of the reader.
    """
    introduce = not rref._is_created and rref.is_unknown()
    return open_stream(rref._usable_worker(), rref.owner_id, name, args, kwargs, seconds, prefetch, rref, introduce)


_CALLS: dict[str, Callable[..., Any]] = {"sync": _sync, "async": _async, "call": _call, "remote": _remote}
