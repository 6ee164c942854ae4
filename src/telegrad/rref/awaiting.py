"""``await rref``: the value, without blocking the event loop or holding a thread."""

import asyncio
from typing import TypeVar

from telegrad.errors import RpcTimeout, TelegradError
from telegrad.rref.handle import Handle
from telegrad.worker import current
from telegrad.worker.calls.client import complete
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.scope import remaining

__all__ = ["await_value"]

T = TypeVar("T")

_DEFAULT_TIMEOUT = -1.0  # that of the worker


async def await_value(rref: Handle[T]) -> T:
    """Await the value, which is a copy except on the owner; see `telegrad.rpc.RRef`.

    It raises the errors of `RRef.to_here`.
    """
    rref._check()
    worker = rref.worker
    references = worker.references
    value: T
    if rref.owner_id != worker.info.id:
        try:
            value = await rref._start(None, _DEFAULT_TIMEOUT)
        except TelegradError as error:
            raise rref._on_error(error)
        rref._is_created = True
        return value
    owned = references.owned(rref.id)
    if not owned.ready:
        created: CallFuture[None] = CallFuture._of()
        seconds = remaining(worker.calls.default_timeout, current.get()) / 1e9
        if references.park(rref.id, lambda: complete(created, None)):
            try:
                async with asyncio.timeout(seconds or None):
                    await created
            except TimeoutError:
                raise RpcTimeout(seconds, f"the creation of {rref!r}") from None
    value = owned.get()
    return value
