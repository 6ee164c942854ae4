"""``await rref``: the value, without blocking the event loop or holding a thread."""

import asyncio
from typing import TYPE_CHECKING, TypeVar

from telegrad.errors import RpcTimeout, TelegradError
from telegrad.worker import current
from telegrad.worker.calls.client import complete
from telegrad.worker.calls.future import NO_DEVICES, CallFuture
from telegrad.worker.scope import remaining

if TYPE_CHECKING:
    from telegrad.rref.rref import RRef

__all__ = ["arrival"]

T = TypeVar("T")

_DEFAULT = -1.0  # as a timeout: the worker's


async def arrival(rref: "RRef[T]") -> T:
    """Await the value: itself on the owner, elsewhere a copy; see `telegrad.rpc.RRef`.

    Raises:
        as `RRef.to_here`.
    """
    rref._check()
    worker = rref.worker
    references = worker.references
    value: T
    if rref.owner_id != worker.info.id:
        try:
            value = await rref._ask(None, _DEFAULT)
        except TelegradError as error:
            raise rref._on_notified(error)
        rref._exists = True
        return value
    owned = references.owned(rref.id)
    if not owned.ready:
        made: CallFuture[None] = CallFuture(NO_DEVICES)
        within = remaining(worker.calls.default_timeout, current.get()) / 1e9
        if references.park(rref.id, lambda: complete(made, None)):
            try:
                async with asyncio.timeout(within or None):
                    await made
            except TimeoutError:
                raise RpcTimeout(within, f"the making of {rref!r}") from None
    value = owned.get()
    return value
