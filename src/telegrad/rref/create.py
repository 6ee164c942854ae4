"""``remote``: run a function elsewhere and keep its result there."""

from typing import Any

from telegrad.errors import NotInitialized
from telegrad.rref.creation import PendingCreation
from telegrad.rref.rref import RRef
from telegrad.worker import Worker
from telegrad.worker.calls.interceptors import active

__all__ = ["create"]


def create(
    worker: Worker, owner: int, function: Any, args: Any, kwargs: Any, timeout: int, receiver: RRef[Any] | None = None
) -> RRef[Any]:
    """A reference to what a function, or a method of a referenced value, returns on its owner.

    The request leaves first, and the reference is registered while the owner runs it. A value of this worker itself is
    registered before, because it may be there at once.

    Args:
        function: with a receiver the name of a method, which the owner looks up. If the receiver's value is still being
            made, the owner waits for it, not the caller.
        timeout: ns for the function to return; 0 for no limit.
    """
    local_id = worker.references.new_id()
    creation = PendingCreation(worker, (owner, function, timeout))
    handle = _register(worker, owner, local_id, creation) if owner == worker.info.id else None
    try:
        worker.calls.client.create(owner, function, args, kwargs, timeout, local_id, creation, receiver)
    except BaseException as e:
        if creation._call:  # it is under way, and a signal handler has raised
            handle or _register(worker, owner, local_id, creation)
        elif handle is not None:
            _not_sent(creation, e)
        raise
    if handle is None:
        handle = _register(worker, owner, local_id, creation)
    if active:
        creation.watched(handle)
    return handle


def _register(worker: Worker, owner: int, local_id: int, creation: PendingCreation) -> RRef[Any]:
    """The new reference, which its creation may have ended already."""
    rref = worker.references.begin_create(owner, local_id, creation)
    handle = RRef.of(worker, rref, owner)
    handle._creation = creation
    if creation.early is not None:
        creation.over(*creation.early)
    return handle


def _not_sent(creation: PendingCreation, error: BaseException) -> None:
    """End a creation that was registered. What raised goes to the caller, and is not kept: its frames have the
    reference."""
    creation.used()
    creation.over(error if isinstance(error, NotInitialized) else RuntimeError(f"not sent: {type(error).__name__}"))
