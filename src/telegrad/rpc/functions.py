"""Decorator for functions with a deferred result."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["async_execution"]

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a ``torch.futures.Future`` of its result.

    The reply of a remote call is sent when that future completes. The thread that ran the function is free in the
    meantime. The caller gets the value, not the future. Works on functions, methods, static and class methods (above or
    below ``@staticmethod`` and ``@classmethod``), and on scripted functions if it is the outermost decorator; through
    ``rpc_sync``, ``rpc_async``, ``remote`` and the proxies of an ``RRef``.

    Args:
        fn: a function that returns a `torch.futures.Future`. Its remote call fails with a ``RuntimeError`` if
            it returns anything else.

    Returns:
        The marked function; a direct call returns the future as before. For type checkers, a remote call of it has the
        type of the future's value.

    Raises:
        no errors; the error of the future is the error of the call.

    Example::

        @rpc.functions.async_execution
        def add_there_and_here(to, x, y, z):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda sum: sum.wait() + z)

        rpc.rpc_sync("worker1", add_there_and_here, args=("worker2", torch.ones(2), 1, 1))
    """
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(async_execution(fn.__func__))

    @functools.wraps(fn)
    def wrapper(*args: object, **kwargs: object) -> Any:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):
        # A scripted function lacks the name by which the callee has to find this wrapper.
        module, _, name = fn.qualified_name.removeprefix("__torch__.").rpartition(".")
        wrapper.__module__, wrapper.__name__, wrapper.__qualname__ = module or "__main__", name, name

    # Bound, static and class methods forward attribute look-ups to the function, so the callee finds this attribute on
    # each of them.
    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
