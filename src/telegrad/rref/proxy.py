"""Calls of a referenced value's methods, on its owner."""

import time
from collections.abc import Callable
from typing import Any

import torch

from telegrad.rref.rref import UNSET, RRef
from telegrad.wire import Tag
from telegrad.worker.uses import goes_short, run_method

__all__ = ["RRefProxy"]

_KINDS = {"rpc_sync": "sync", "rpc_async": "async", "remote": "remote"}


class RRefProxy:
    """Every attribute is a function that runs the method of that name on the owner; see `RRef.rpc_sync`.

    Args:
        rref: refers to the value.
        kind: "sync", "async" or "remote"; or, as in torch, ``rpc_sync``, ``rpc_async`` or ``remote`` itself.
        timeout: seconds; -1 is the default of the worker.
    """

    __slots__ = ("_kind", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], kind: str | Callable[..., Any], timeout: float = UNSET) -> None:
        self._rref = rref
        self._kind = kind if type(kind) is str else _KINDS[kind.__name__]  # type: ignore[union-attr]
        self._timeout = timeout

    def __getattr__(self, name: str) -> "_Method":
        return _Method(self._rref, self._kind, self._timeout, name)


class _Method:
    __slots__ = ("_kind", "_name", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], kind: str, timeout: float, name: str) -> None:
        self._rref = rref
        self._kind = kind
        self._timeout = timeout
        self._name = name

    def __repr__(self) -> str:
        return f"<remote method {self._name} of {self._rref!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rref = self._rref
        rref._check()
        worker = rref._worker
        worker.require_open()
        calls = worker.calls
        timeout = calls.timeout(self._timeout)
        if self._kind == "remote":
            return self._remote(args, kwargs, timeout)
        if self._kind == "sync" and rref._exists and goes_short(calls) and not rref.is_owner():
            return calls.call(rref.owner_id, run_method, (*rref.id, self._name, args, kwargs), {}, timeout, self._name)
        request = rref._request(
            Tag.METHOD, timeout, self._name, method=self._name, body=(args, kwargs), mode=self._kind
        )
        if self._kind != "sync":
            return calls.start(request)
        try:
            result = calls.sync(request)
        except AttributeError:  # of the value, or of what its method does
            rref._exists = True
            raise
        rref._exists = True
        return result

    def _remote(self, args: Any, kwargs: Any, timeout: int) -> RRef[Any]:
        from telegrad.rref.create import create_by_method

        rref = self._rref
        start = time.monotonic_ns()
        # Whoever gives it a time hears here, as in torch, that the value has not been made within it.
        kind = rref._get_type(self._timeout) if self._timeout not in (UNSET, 0) else rref._known_type()
        if kind is not None:
            # As in torch, a method that does not exist is an error here and now; of a value that is still being made,
            # the reference made here says so when it is used.
            if not issubclass(kind, torch.jit.ScriptModule):
                getattr(kind, self._name)
            if timeout:
                timeout = max(timeout - (time.monotonic_ns() - start), 1)
        return create_by_method(rref, self._name, args, kwargs, timeout)
