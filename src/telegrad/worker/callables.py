"""What is called: its name for errors, whether torch has it, and the call itself."""

from collections.abc import Callable
from typing import Any

import torch

from telegrad.serialize.names import resolve
from telegrad.serialize.pickling import NOT_FOUND_HINT

__all__ = ["as_torch_says", "find_builtin", "find_function", "is_scripted", "name_of", "run"]


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
        result, error = as_torch_says(function, args, kwargs, e)
        if error is not None:
            raise
        return result


def as_torch_says(function: Any, args: Any, kwargs: Any, error: BaseException) -> tuple[Any, BaseException | None]:
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
