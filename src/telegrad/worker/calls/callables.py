"""Functions, methods and arguments of a call, as given by the program."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from telegrad.errors import is_drop_in
from telegrad.serialize.function_names import resolve
from telegrad.serialize.pickling import NOT_FOUND_HINT
from telegrad.worker.scope import current

__all__ = [
    "callee_of",
    "checked_arguments",
    "find_builtin",
    "find_function",
    "found",
    "full_name_of",
    "is_scripted",
    "method_of",
    "name_of",
    "read_attribute",
    "read_with",
    "require_plain_function",
    "rerun_for_torch_error",
    "run",
]


def name_of(function: object) -> str:
    """Return the name of a function, for error messages."""
    name: str = getattr(function, "__qualname__", None) or repr(function)
    return name.removeprefix("_VariableFunctionsClass.")  # where torch keeps functions such as torch.add


def full_name_of(function: object) -> str:
    """Return the name of a function with its module, for people."""
    return f"{getattr(function, '__module__', '?')}.{name_of(function)}"


def require_plain_function(function: object, role: str, remedy: str) -> None:
    """Check a function of the program that Telegrad calls, and does not await.

    Args:
        function: The function.
        role: Its role, for the error.
        remedy: How to use a coroutine instead.

    Raises:
        TypeError: It is not callable, or is an ``async def``.
    """
    if not callable(function):
        raise TypeError(f"{role} has to be callable, and {function!r} is not")
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{role} has to be a plain function, and {name_of(function)} is an async def. {remedy}")


def is_scripted(function: object) -> bool:
    """Return whether a function is a torch operator or a scripted function.

    Torch's own RPC has separate message types for these.
    """
    if isinstance(function, torch.jit.ScriptFunction):
        return True
    return find_builtin(function) is not None


def find_builtin(function: object) -> str | None:
    """Return the registered name of a torch operator, such as ``aten::add``, or None."""
    name: str | None = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    return name


def run(function: Callable[..., object], args: Iterable[object], kwargs: Mapping[str, object]) -> object:
    """Call a function; for wrong arguments, raise a torch operator's own error."""
    try:
        return function(*args, **kwargs)
    except TypeError as e:
        result, error = rerun_for_torch_error(function, args, kwargs, e)
        if error is not None:
            raise
        return result


def rerun_for_torch_error(
    function: object, args: Iterable[object], kwargs: Mapping[str, object], error: BaseException
) -> tuple[object, BaseException | None]:
    """Call a torch operator again, for the error that torch's own RPC would raise.

    Returns:
        The operator's result if the second call succeeds, or the given error.

    Raises:
        Exception: Whatever the operator raises.
    """
    name = find_builtin(function) if isinstance(error, TypeError) else None
    if name is None:
        return None, error
    operation, _ = torch._C._jit_get_operation(name)
    return operation(*args, **kwargs), None


def find_function(name: bytes) -> object:
    """Return the function with a name.

    Raises:
        AttributeError, ImportError: This worker has no such function; the text has a hint.
    """
    try:
        return resolve(name)
    except (AttributeError, ImportError, KeyError) as e:
        kind = AttributeError if isinstance(e, KeyError) else type(e)
        raise kind(f"{e}.{NOT_FOUND_HINT}") from e


def read_attribute(rref: Any, name: str) -> object:
    """Return an attribute of a referenced value; runs on the owner."""
    return functools.reduce(rref.worker.handlers.exposure.read, name.split("."), rref.local_value())


def found(function: bytes | Callable[..., object]) -> Any:
    """Return the program's function in a message, given its name or itself."""
    return find_function(function) if isinstance(function, bytes) else function


def callee_of(function: bytes | Callable[..., object]) -> Any:
    """Return what `found` does, at the callee and if it exposes the function.

    Args:
        function: The function's name in messages, or the function.

    Raises:
        NotExposed: The worker does not expose the function.
        AttributeError, ImportError: As for `find_function`.
    """
    scope = current.get()
    assert scope is not None
    return scope.worker.handlers.exposure.callee_of(function)


def read_with(name: str) -> str:
    """Return how an attribute can be read, for error messages."""
    return f"Read an attribute with rref.get_attr({name!r})."


def method_of(value: object, name: str) -> object:
    """Return a method of a referenced value.

    Raises:
        AttributeError: The value has no such attribute; the text is torch's.
        TypeError: The attribute is not callable.
    """
    try:
        method = getattr(value, name)
    except AttributeError:
        if hasattr(type(value), name):  # a property raised the error
            raise
        raise AttributeError(f"type object {type(value).__name__!r} has no attribute {name!r}") from None
    if not callable(method) and not is_drop_in():
        raise TypeError(
            f"{name!r} of {type(value).__qualname__} is not a method but of type {type(method).__qualname__}."
            f" {read_with(name)}"
        )
    return method


def checked_arguments(args: object, kwargs: object) -> tuple[Any, Any]:
    """Return the arguments, with empty ones instead of None.

    The drop-in accepts what torch accepts: any empty value means no arguments, and anything that can be unpacked is
    valid.

    Raises:
        TypeError: ``args`` is neither a tuple nor a list, or ``kwargs`` is not a mapping.
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
