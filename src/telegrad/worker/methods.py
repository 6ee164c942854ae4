"""Methods of values that are known to exist, as calls of a plain function: those take the short way of calls.

A request about a reference names it in its preamble, waits at the owner until the value has been made, and brings the
reference along if the owner may not know it yet. Where none of that can be needed, three plain values say the same.
"""

from typing import Any

from telegrad.protocols.rref import RRefId
from telegrad.worker.scope import current

__all__ = ["Later", "method_of", "run_method"]


class Later:
    """What a method has returned that completes its result later (`telegrad.rpc.functions.async_execution`)."""

    __slots__ = ("method", "result")

    def __init__(self, method: Any, result: Any) -> None:
        self.method = method
        self.result = result


def run_method(created_on: int, local_id: int, name: str, args: Any, kwargs: Any) -> Any:
    """Runs on an owner: a method of a value. The caller has a reference to it."""
    scope = current.get()
    assert scope is not None
    method = method_of(scope.worker.references.owned(RRefId(created_on, local_id)).get(), name)
    result = method(*args, **kwargs)
    return Later(method, result) if hasattr(method, "_wrapped_async_rpc_function") else result


def method_of(value: Any, name: str) -> Any:
    """A method of a referenced value.

    Raises:
        AttributeError: it has none of this name, in torch's words.
    """
    try:
        return getattr(value, name)
    except AttributeError:
        if hasattr(type(value), name):  # a property that raised it
            raise
        raise AttributeError(f"type object {type(value).__name__!r} has no attribute {name!r}") from None
