"""Functions, methods and arguments of a call, as the program gives them."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from telegrad.errors import is_drop_in
from telegrad.serialize.function_names import resolve
from telegrad.serialize.pickling import NOT_FOUND_HINT

__all__ = [
    "checked_arguments",
    "find_builtin",
    "find_function",
    "is_scripted",
    "method_of",
    "name_of",
    "read_attribute",
    "read_with",
    "rerun_for_torch_error",
    "run",
]


def name_of(function: Any) -> str:
    """What errors call it."""
    return getattr(function, "__qualname__", None) or repr(function)


def is_scripted(function: Any) -> bool:
    """Is it a torch operator or a scripted function? (torch's own RPC has other message types for these.)"""
    if isinstance(function, torch.jit.ScriptFunction):
        return True
    return find_builtin(function) is not None


def find_builtin(function: Any) -> str | None:
    """The name of a torch operator in torch's registry, such as ``aten::add``; None for everything else."""
    name: str | None = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    return name


def run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls it, and lets a torch operator say what is wrong with its arguments."""
    try:
        return function(*args, **kwargs)
    except TypeError as e:
        result, error = rerun_for_torch_error(function, args, kwargs, e)
        if error is not None:
            raise
        return result


def rerun_for_torch_error(
    function: Any, args: Any, kwargs: Any, error: BaseException
) -> tuple[Any, BaseException | None]:
    """A torch operator that is called with wrong arguments says so as it does through torch's own RPC.

    Returns:
        The operator's result after all, or the error given.

    Raises:
        what the operator says.
    """
    name = find_builtin(function) if isinstance(error, TypeError) else None
    if name is None:
        return None, error
    operation, _ = torch._C._jit_get_operation(name)
    return operation(*args, **kwargs), None


def find_function(name: bytes) -> Any:
    """The function of a name.

    Raises:
        AttributeError, ImportError: it is not on this worker; with a hint.
    """
    try:
        return resolve(name)
    except (AttributeError, ImportError, KeyError) as e:
        kind = AttributeError if isinstance(e, KeyError) else type(e)
        raise kind(f"{e}.{NOT_FOUND_HINT}") from e


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
