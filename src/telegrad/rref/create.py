"""``remote``: run a function elsewhere and keep its result there."""

from asyncio import _get_running_loop
from collections.abc import Callable
from typing import Any

import torch

from telegrad.errors import NotInitialized
from telegrad.protocols.rref import RRefId
from telegrad.rref.creation import Creation
from telegrad.rref.rref import RRef
from telegrad.serialize.names import NotByName
from telegrad.wire import Flag, Tag
from telegrad.worker import Worker
from telegrad.worker.callables import is_scripted
from telegrad.worker.calls import Request
from telegrad.worker.future import NO_DEVICES, CallFuture
from telegrad.worker.scope import current, remaining
from telegrad.worker.uses import goes_short

__all__ = ["create", "create_by_method", "create_directly"]

_MAY_LINGER = int(Flag.MAY_LINGER)
# A creation leaves even if it times out first (the owner may be far from connected): others may know of the reference.

_UNHURRIED = 1_000_000_000  # ns: a call with this time-out does not end before this worker keeps count of its reference

is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled


def create_directly(worker: Worker, owner: int, local_id: int, func: Any, args: Any, kwargs: Any) -> RRef[Any] | None:
    """As `create`, of a call that the program makes with the default timeout, and outside of any request. None where
    that takes more than a look, and nothing has been done.

    The request leaves first; the rest is done while the owner is at it.
    """
    calls = worker.calls
    timeout = calls.default_timeout
    if current.get() is not None or calls.send_filter is not None or calls.custom_pickler is not None:
        return None
    if 0 < timeout < _UNHURRIED:
        return None
    if owner == worker.info.id:
        return None
    creation = Creation(worker, (owner, func, timeout))
    creation._calls = calls
    try:
        calls.plain.make_directly(owner, func, args, kwargs, local_id, timeout, creation)
    except BaseException:
        if creation._call:  # it is under way, and a signal handler has raised
            _begun(worker, owner, local_id, creation)
        raise
    return _begun(worker, owner, local_id, creation) if creation._call else None


def create(worker: Worker, owner: int, local_id: int, func: Any, args: Any, kwargs: Any, timeout: int) -> RRef[Any]:
    """A reference to what ``func(*args, **kwargs)`` returns on its owner.

    Args:
        local_id: the number of the new reference, by `References.new_id`.
        timeout: ns for the function to return; 0 for no limit.
    """
    handle, creation = _begin(worker, owner, local_id, (owner, func, timeout))
    if owner == worker.info.id or not _sent_short(worker, handle, creation, func, args, kwargs, timeout):

        def request(rref: RRefId) -> Request:
            return worker.calls.function_call(
                owner, func, args, kwargs, timeout, tag=int(Tag.CREATE), flags=_MAY_LINGER, target=rref, mode="remote"
            )

        _send(handle, creation, request, worker.calls.send_filter is not None and is_scripted(func))
    return handle


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

    handle, creation = _begin(worker, owner, worker.references.new_id(), (owner, method, timeout))
    _send(handle, creation, request, False)
    return handle


def _begin(worker: Worker, owner: int, local_id: int, request: tuple[int, Any, int]) -> tuple[RRef[Any], Creation]:
    """A new reference."""
    creation = Creation(worker, request)
    return _begun(worker, owner, local_id, creation), creation


def _begun(worker: Worker, owner: int, local_id: int, creation: Creation) -> RRef[Any]:
    """The same, of what is being made perhaps already."""
    rref = worker.references.begin_create(owner, local_id, creation)
    handle = RRef.of(worker, rref, owner)
    handle._creation = creation
    if creation.early is not None:
        creation.over(*creation.early)
    return handle


def _sent_short(
    worker: Worker, handle: RRef[Any], creation: Creation, func: Any, args: Any, kwargs: Any, timeout: int
) -> bool:
    """Sends the request that makes a new reference elsewhere, if it carries nothing but plain values. False: it
    carries more, and has not been sent."""
    calls = worker.calls
    scope = current.get()
    nested = False
    if scope is not None:
        if scope.autograd is not None:
            return False
        nested = scope.nested
        timeout = remaining(timeout, scope)
    if not goes_short(calls) or not is_grad_enabled():
        return False
    try:
        number, text = calls.names.find(func)
    except NotByName:
        return False
    except BaseException as e:  # its __hash__
        _not_sent(creation, e)
        raise
    creation._calls = calls
    try:
        calls.plain.make(
            handle.owner_id, number, text, args, kwargs, handle.id.local_id, timeout, nested,
            _get_running_loop() is not None, creation,
        )  # fmt: skip
    except NotInitialized as e:
        creation.over(e)
        raise
    except BaseException as e:
        if not creation._call:  # else it is under way, and a signal handler has raised
            _not_sent(creation, e)
        raise
    return creation._call != 0


def _send(handle: RRef[Any], creation: Creation, request_for: Callable[[RRefId], Request], scripted: bool) -> None:
    """Sends the request that makes a new reference."""
    worker = handle.worker
    calls = worker.calls
    try:
        request = request_for(handle.id)
    except BaseException as e:
        _not_sent(creation, e)
        raise
    try:
        if calls.send_filter is None:
            creation._span = request.span
            calls.send(request, creation)
        else:
            _send_filtered(handle, creation, request, scripted)
    except NotInitialized as e:  # another thread has closed the worker meanwhile
        creation.over(e)
        raise
    if request.span is not None:
        handle._profiling = creation.future()


def _not_sent(creation: Creation, error: BaseException) -> None:
    """What raised goes to the caller, and is not kept: its frames have the reference, which nobody else has."""
    creation.used()
    creation.over(RuntimeError(f"not sent: {type(error).__name__}"))


def _send_filtered(handle: RRef[Any], creation: Creation, request: Request, scripted: bool) -> None:
    """The same, past a fault injector."""
    worker = handle.worker
    handle._scripted = scripted
    future: CallFuture[Any] = CallFuture(NO_DEVICES)
    future._read = True  # the creation tells who uses the reference
    rref = handle.id
    if not handle.is_owner():
        future._late = lambda: worker.references.created(rref)

    def over(_: Any) -> None:
        creation.over(future.failure())
        creation.complete()

    torch.futures.Future.add_done_callback(future, over)
    worker.calls.start(request, future)
