"""The type of a value, which its owner knows."""

import asyncio
import weakref
from typing import Any

import torch

from telegrad.rref.handle import AnyHandle
from telegrad.worker.calls.future import CallFuture

__all__ = ["UNSET", "method_type", "request_type"]

UNSET = -1.0  # default of timeouts


def request_type(rref: AnyHandle, timeout: float) -> CallFuture[Any]:
    """Request the type of the value and return its future, which the handle keeps."""
    rref._check()
    if rref.is_owner():
        future: CallFuture[Any] = CallFuture._of()
        try:
            future._succeed(type(rref.worker.references.owned(rref.id).get()))
        except Exception as e:
            future._fail(e.with_traceback(None))
    else:
        future = rref._start(type, timeout)
    rref._type_future = future
    weak_handle, weak_future = weakref.ref(rref), weakref.ref(future)

    def forget_failure(_: object) -> None:
        handle, done = weak_handle(), weak_future()
        if handle is not None and done is not None and handle._type_future is done and done.failure() is not None:
            handle._type_future = None  # the next call requests it again

    torch.futures.Future.add_done_callback(future, forget_failure)
    return future


def method_type(rref: AnyHandle, timeout: float) -> type | None:
    """Return the type that must have a called method, or None if it is unknown.

    With a timeout this waits for the type. Otherwise it is None unless the value is known to exist. In an event loop,
    which must not block, it is None unless the type has arrived.
    """
    if not rref.worker.messages.gate.is_open:
        return None  # classes travel as pickles
    future = rref._type_future
    if timeout in (UNSET, 0):
        if future is None:
            if rref.is_owner():
                rref._is_created = rref.worker.references.owned(rref.id).ready
            elif rref._creation is not None and rref._creation.done():
                rref._is_created = True
            if not rref._is_created:
                return None
        elif not future.done():
            return None
    if asyncio._get_running_loop() is not None and not (future is not None and future.done()):
        return None
    kind: type | None = (future or request_type(rref, timeout)).wait()
    return kind
