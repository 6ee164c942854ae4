"""Calls of a referenced value's methods, on its owner."""

from typing import Any

import torch

from telegrad.rref.rref import RRef
from telegrad.wire import Tag

__all__ = ["RRefProxy"]


class RRefProxy:
    """Every attribute is a function that runs the method of that name on the owner; see `RRef.rpc_sync`."""

    __slots__ = ("_kind", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], kind: str, timeout: float) -> None:
        self._rref = rref
        self._kind = kind
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
        request = rref._request(Tag.METHOD, timeout, self._name, method=self._name, body=(args, kwargs))
        return calls.sync(request) if self._kind == "sync" else calls.start(request)

    def _remote(self, args: Any, kwargs: Any, timeout: int) -> RRef[Any]:
        from telegrad.rref.create import create

        rref = self._rref
        # As in torch, a method that does not exist is an error here and now. The type is asked for once.
        kind = rref._get_type(self._timeout, blocking=False).wait()
        if not issubclass(kind, torch.jit.ScriptModule):
            method = getattr(kind, self._name)
            if hasattr(method, "_wrapped_async_rpc_function"):
                return create(
                    rref._worker, rref.owner_id, call_method_async, (rref, self._name, args, kwargs), {}, timeout
                )
        return create(rref._worker, rref.owner_id, call_method, (rref, self._name, args, kwargs), {}, timeout)


def call_method(rref: RRef[Any], name: str, args: Any, kwargs: Any) -> Any:
    """Runs on the owner."""
    return getattr(rref.local_value(), name)(*args, **kwargs)


def call_method_async(rref: RRef[Any], name: str, args: Any, kwargs: Any) -> Any:
    """Runs on the owner; the method returns a future."""
    return getattr(rref.local_value(), name)(*args, **kwargs)


call_method_async._wrapped_async_rpc_function = call_method_async  # type: ignore[attr-defined]
