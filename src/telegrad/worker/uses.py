"""Uses of values that are known to exist, or to be on their way, as calls of a plain function: those take the short way
of calls.

A request about a reference names it in its preamble, waits at the owner until the value has been made, and brings the
reference along if the owner may not know it yet. Where none of that can be needed, a few plain values say the same.
"""

from operator import attrgetter
from typing import Any

from telegrad.errors import is_drop_in
from telegrad.protocols.rref import RRefId
from telegrad.worker import profiling
from telegrad.worker.scope import current

__all__ = [
    "NOT_MADE",
    "Later",
    "NotMade",
    "NotYet",
    "fetch",
    "goes_short",
    "method_of",
    "read_attribute",
    "read_with",
    "run_method",
]


def goes_short(calls: Any) -> bool:
    """May a use of a value go the way of all calls? (Else profiles, and who drops messages, would take it for one.)"""
    return calls.send_filter is None and calls.custom_pickler is None and not profiling.unusual()


class NotMade:
    """What `Calls.call` returns for a use that may not go that way, and has not been made."""


NOT_MADE = NotMade()


class Later:
    """What a method has returned that completes its result later (`telegrad.rpc.functions.async_execution`)."""

    __slots__ = ("method", "result")

    def __init__(self, method: Any, result: Any) -> None:
        self.method: Any = method
        self.result: Any = result


class NotYet:
    """A value that is to be fetched, and is not there, or never will be."""

    __slots__ = ("rref",)

    def __init__(self, rref: RRefId) -> None:
        self.rref: RRefId = rref


def run_method(created_on: int, local_id: int, name: str, args: Any, kwargs: Any) -> Any:
    """Runs on an owner: a method of a value. The caller has a reference to it, and knows that it exists."""
    scope = current.get()
    assert scope is not None
    references = scope.worker.references
    owned = references.values.get((created_on, local_id))  # as good as an RRefId, and sooner made
    if owned is None:
        owned = references.owned(RRefId(created_on, local_id))
    method = method_of(owned.value if owned.ready and owned.error is None else owned.get(), name)
    result = method(*args, **kwargs)
    return Later(method, result) if hasattr(method, "_wrapped_async_rpc_function") else result


def fetch(created_on: int, local_id: int) -> Any:
    """Runs on an owner: the value. The caller has a reference that the owner counts, or has sent its creation."""
    scope = current.get()
    assert scope is not None
    owned = scope.worker.references.values.get((created_on, local_id))
    if owned is None or not owned.ready or owned.error is not None:
        return NotYet(RRefId(created_on, local_id))
    return owned.value


def read_attribute(rref: Any, name: str) -> Any:
    """Runs on an owner: what an attribute of a referenced value holds."""
    return attrgetter(name)(rref.local_value())


def read_with(name: str) -> str:
    """For errors: how an attribute is read."""
    return f"Read an attribute with rref.get_attr({name!r})."


def method_of(value: Any, name: str) -> Any:
    """A method of a referenced value.

    Raises:
        AttributeError: it has none of this name, in torch's words.
        TypeError: it has something else of this name, which cannot be called.
    """
    try:
        method = getattr(value, name)
    except AttributeError:
        if hasattr(type(value), name):  # a property that raised it
            raise
        raise AttributeError(f"type object {type(value).__name__!r} has no attribute {name!r}") from None
    if not callable(method) and not is_drop_in():
        raise TypeError(
            f"{name!r} of {type(value).__qualname__} is no method, but of type {type(method).__qualname__}."
            f" {read_with(name)}"
        )
    return method
