"""``remote``: run a function elsewhere and keep its result there."""

from collections.abc import Callable
from typing import Any

import torch

from telegrad.errors import NotInitialized, RpcTimeout, WorkerLost
from telegrad.protocols.rref import RRefId
from telegrad.rref.rref import RRef
from telegrad.wire import Flag, Tag
from telegrad.worker import Worker
from telegrad.worker.callables import is_scripted
from telegrad.worker.calls import Request
from telegrad.worker.future import NO_DEVICES, CreationFuture

__all__ = ["create", "create_by_method"]

_MAY_LINGER = int(Flag.MAY_LINGER)
# A creation leaves even if it times out first (the owner may be far from connected): others may know of the reference.


def create(worker: Worker, owner: int, func: Any, args: Any, kwargs: Any, timeout: int) -> RRef[Any]:
    """A reference to what ``func(*args, **kwargs)`` returns on its owner.

    Args:
        timeout: ns for the function to return; 0 for no limit.
    """

    def request(rref: RRefId) -> Request:
        return worker.calls.function_call(
            owner, func, args, kwargs, timeout, tag=int(Tag.CREATE), flags=_MAY_LINGER, target=rref, mode="remote"
        )

    return _create(worker, owner, request, worker.calls.send_filter is not None and is_scripted(func))


def create_by_method(on: RRef[Any], method: str, args: Any, kwargs: Any, timeout: int) -> RRef[Any]:
    """A reference to what a method of a referenced value returns. If the value is still being made, its owner waits
    for it, not the caller; the owner looks the method up, too.

    Args:
        timeout: as for `create`.
    """
    worker, owner = on.worker, on.owner_id

    def request(rref: RRefId) -> Request:
        ticket = worker.references.share(on.id, owner, owner)
        return worker.calls.about(
            owner, Tag.CREATE_METHOD, rref, ticket, timeout, None, method,
            method=method, body=(args, kwargs), flags=_MAY_LINGER, mode="remote",
        )  # fmt: skip

    return _create(worker, owner, request, False)


def _create(worker: Worker, owner: int, request_for: Callable[[RRefId], Request], scripted: bool) -> RRef[Any]:
    """Sends the request that makes a new reference."""
    references = worker.references
    rref = references.begin_create(owner)
    handle = RRef.of(worker, rref, owner)
    try:
        request = request_for(rref)
    except BaseException as e:
        references.create_failed(rref, e, may_exist=False)
        references.creation_over()
        raise
    future = CreationFuture(NO_DEVICES)
    if worker.calls.send_filter is not None:
        handle._scripted = scripted
        if owner != worker.info.id:
            future._late = lambda: references.created(rref)
    handle._creation = future
    if request.span is not None:
        handle._profiling = future

    def over(_: Any) -> None:
        failure = future.failure()
        if isinstance(failure, RpcTimeout):
            may_exist = failure.state != "not sent" or worker.info.id == owner
            references.create_failed(rref, failure, may_exist=may_exist)
        elif isinstance(failure, WorkerLost):
            pass  # the loss itself tells the protocol
        elif failure is not None:
            references.create_failed(rref, failure, may_exist=False)
        elif owner != worker.info.id:
            references.created(rref)
        references.creation_over()

    torch.futures.Future.add_done_callback(future, over)
    try:
        worker.calls.start(request, future)
    except NotInitialized as e:  # another thread has closed the worker meanwhile
        references.create_failed(rref, e, may_exist=False)
        references.creation_over()
        raise
    return handle
