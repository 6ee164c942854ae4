"""Methods and attributes of referenced values, on their owner."""

from operator import attrgetter
from typing import Any

from telegrad.errors import is_drop_in

__all__ = ["method_of", "read_attribute", "read_with"]


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
