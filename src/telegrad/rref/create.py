"""``remote``: run a function on another worker and keep its result there."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from telegrad.errors import NotInitialized
from telegrad.rref.creation import PendingCreation
from telegrad.rref.handle import AnyHandle
from telegrad.worker import Worker

__all__ = ["create"]

H = TypeVar("H", bound=AnyHandle)


def create(
    handle_type: type[H],
    worker: Worker,
    owner: int,
    function: Callable[..., object] | str,
    args: Sequence[object] | None,
    kwargs: Mapping[str, object] | None,
    timeout: int,
    receiver: AnyHandle | None = None,
) -> H:
    """Create a reference to the result of a function or method.

    The request leaves before the reference is registered, so that the owner runs it meanwhile. A value of this worker
    is registered first, because it may be ready at once.

    Args:
        handle_type: The class of the result.
        worker: This worker.
        owner: The worker that runs the function.
        function: With a receiver the name of a method, which the owner resolves. If the receiver's value does not exist
            yet, the owner waits for it, not the caller.
        args: Its arguments.
        kwargs: Its keyword arguments.
        timeout: Limit in ns for the function to return; 0 for no limit.
        receiver: Reference to the object of the method.
    """
    local_id = worker.references.new_id()
    creation = PendingCreation(worker, (owner, function, timeout))
    handle = _register(handle_type, worker, owner, local_id, creation) if owner == worker.info.id else None
    try:
        worker.calls.client.create(owner, function, args, kwargs, timeout, local_id, creation, receiver)
    except BaseException as e:
        if creation._call:  # the request has left, and a signal handler has raised
            handle or _register(handle_type, worker, owner, local_id, creation)
        elif handle is not None:
            _end_unsent(creation, e)
        raise
    if handle is None:
        try:
            handle = _register(handle_type, worker, owner, local_id, creation)
        except BaseException:  # of a signal handler, which raises in no thread of the pool
            worker.pool.submit(_register_again, handle_type, worker, owner, local_id, creation)
            raise
    return handle


def _register(handle_type: type[H], worker: Worker, owner: int, local_id: int, creation: PendingCreation) -> H:
    """Register a reference and return its handle; its creation may have ended."""
    rref = worker.references.begin_create(owner, local_id, creation)
    creation.has_handle = True
    handle = handle_type.of(worker, rref, owner)
    handle._creation = creation
    if creation.early_result is not None:
        creation.finish(*creation.early_result)
    return handle


def _register_again(handle_type: type[H], worker: Worker, owner: int, local_id: int, creation: PendingCreation) -> None:
    """Complete a registration that was interrupted at any moment.

    Its handle, if there is none yet, ends here.
    """
    if not creation.has_handle:
        _register(handle_type, worker, owner, local_id, creation)
    elif creation.early_result is not None and not creation.ended:
        creation.finish(*creation.early_result)


def _end_unsent(creation: PendingCreation, error: BaseException) -> None:
    """End a registered creation that was not sent.

    The error itself goes to the caller and is not kept: its frames refer to the reference.
    """
    creation.mark_used()
    creation.finish(error if isinstance(error, NotInitialized) else RuntimeError(f"not sent: {type(error).__name__}"))
