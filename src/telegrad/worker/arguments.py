"""The arguments of a call as a program gives them."""

from collections.abc import Mapping
from typing import Any

from telegrad.errors import is_drop_in

__all__ = ["checked_arguments"]


def checked_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, with nothing in place of None.

    Under the drop-in they are taken as torch takes them: whatever is empty is none, and whatever can be unpacked is.

    Raises:
        TypeError: ``args`` is no tuple or list, or ``kwargs`` no mapping.
    """
    if args is None:
        args = ()
    elif not isinstance(args, (tuple, list)):
        if not is_drop_in():
            raise TypeError(
                f"args has to be a tuple or list, and is of type {type(args).__qualname__}. For one argument write"
                " args=(value,), with the comma."
            )
        args = args or ()
    if kwargs is None:
        kwargs = {}
    elif not isinstance(kwargs, Mapping):
        if not is_drop_in():
            raise TypeError(f"kwargs has to be a dict of names and values, and is of type {type(kwargs).__qualname__}")
        kwargs = kwargs or {}
    return args, kwargs
