"""Errors that the reader of a stream gets."""

from typing import Final, NoReturn

from telegrad.errors import NotInitialized, RemoteError, RpcTimeout, SerializationError, WorkerLost

__all__ = ["STATE_GRACE", "again", "closed_at_callee", "expired", "is_expiry", "not_an_end", "raise_to_reader"]

STATE_GRACE: Final = 40_000_000
"""Time in ns that a reader waits for the state of a request; the core asks for 20 ms (kStateGrace)."""

_RESULT: Final = "result[3][0]"  # place of a solitary item in the reply, in error texts


def raise_to_reader(stream: object, error: BaseException, taken: int) -> NoReturn:
    """Raise the error that has ended a stream.

    Args:
        stream: The stream, for the texts.
        error: The error.
        taken: Items before it.
    """
    if isinstance(error, SerializationError) and error.args and _RESULT in str(error.args[0]):
        error.args = (str(error.args[0]).replace(_RESULT, f"item {taken} of {stream}"), *error.args[1:])
    elif isinstance(error, (StopIteration, StopAsyncIteration)):  # would look like the end of the stream
        raise not_an_end(error, stream)
    elif not isinstance(error, (WorkerLost, NotInitialized)):
        error.add_note(f"raised by {stream} after {taken} items")
    raise error


def not_an_end(error: BaseException, what: object) -> RuntimeError:
    """Return an error to raise instead of a StopIteration.

    Raised itself, it would look like the end of the items.

    Args:
        error: The StopIteration or StopAsyncIteration, usually of a remote function.
        what: What raised it, for the text.
    """
    raised = type(error).__name__
    if not isinstance(error, RemoteError):
        instead = RuntimeError(f"{what} raised {raised}")
    else:
        instead = RemoteError(f"{what} raised {raised}")
        instead.worker, instead.worker_id = error.worker, error.worker_id
        instead.original_type, instead.remote_traceback = error.original_type, error.remote_traceback
    for note in getattr(error, "__notes__", ()):
        instead.add_note(note)
    instead.__cause__ = error
    return instead


def again(stream: object, error: BaseException | None, taken: int, is_closed: bool) -> str:
    """Return the text of the error of a reader that comes back after the end.

    Args:
        stream: The stream, for the text.
        error: The error that ended it, if any.
        taken: Items that the reader has.
        is_closed: The program has closed it.
    """
    how = "was closed" if is_closed else "was read to its end"
    if error is not None:
        how = f"ended with {type(error).__name__}"
    return (
        f"{stream} {how} after {taken} items, and can be read only once. Call rpc.stream again, or keep the items in a"
        " list."
    )


def is_expiry(error: BaseException | None) -> bool:
    """Return whether a request has no error but that of its timeout."""
    return error is None or (isinstance(error, RpcTimeout) and not isinstance(error, RemoteError))


def expired(stream: object, error: BaseException | None, timeout: int, taken: int) -> RpcTimeout:
    """Return the error of a wait that has exceeded its timeout.

    Args:
        stream: The stream, for the text.
        error: Error of the request in progress, whose state says how far it had come.
        timeout: The timeout in ns.
        taken: Items that the reader has.
    """
    state = error.state if isinstance(error, RpcTimeout) else "unknown"
    return RpcTimeout(timeout / 1e9, f"item {taken} of {stream}", state)


def closed_at_callee(label: str) -> str:
    """Return the reason of a loss that only the end of a stream shows.

    Args:
        label: Name of the stream's function.
    """
    return (
        f"it has closed the stream of {label} before its end, because it shuts down, or because the connection of the"
        " two workers was lost in between"
    )
