"""Errors of operations with internal calls that time out.

The error of a call names its function, which the program does not know if an operation of the API makes the call.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from telegrad.errors import RemoteError, RpcTimeout
from telegrad.wire.layout import CallStateText

__all__ = ["naming_timeouts", "of_operation"]

_E = TypeVar("_E", bound=BaseException)

_LARGER_DEFAULT = "Give init_rpc's options a larger rpc_timeout (0 for no limit)."
_NOT_LATE: Final = (CallStateText.WAITING, CallStateText.UNKNOWN)  # states in which a larger timeout is no remedy


def of_operation(error: _E, functions: Collection[str], operation: str, takes_timeout: bool = False) -> _E | RpcTimeout:
    """Return the error of an operation for that of its call.

    A timeout names the operation; any other error is unchanged.

    Args:
        error: The error of the call.
        functions: Names of the functions that the operation calls.
        operation: Name of the operation, as its user calls it.
        takes_timeout: Whether the operation has an argument `timeout`.
    """
    if not isinstance(error, RpcTimeout) or isinstance(error, RemoteError):
        return error
    function, _, worker = error.call.rpartition(" on ")
    if function not in functions:
        return error
    remedy = "" if takes_timeout or error.state in _NOT_LATE else _LARGER_DEFAULT
    named = RpcTimeout(error.timeout, f"{operation} on {worker}", error.state, remedy)
    for note in getattr(error, "__notes__", ()):
        named.add_note(note)
    return named


@contextmanager
def naming_timeouts(functions: Collection[str], operation: str, takes_timeout: bool = False) -> Iterator[None]:
    """Raise timeouts of calls as those of an operation; see `of_operation`."""
    try:
        yield
    except RpcTimeout as error:
        named = of_operation(error, functions, operation, takes_timeout)
        if named is error:
            raise
        raise named from None
