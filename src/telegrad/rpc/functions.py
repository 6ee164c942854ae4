"""The decorator for functions whose result comes later."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["async_execution"]

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a ``torch.futures.Future`` of its result.

    When such a function is called remotely, the reply is sent when that future completes, and the
    thread that ran the function is free in the meantime. The caller sees nothing of it: it gets
    the value. Works on functions, methods, static and class methods (above or below
    ``@staticmethod`` and ``@classmethod``), and on scripted functions if it is the outermost
    decorator; through ``rpc_sync``, ``rpc_async``, ``remote`` and the proxies of an ``RRef``.

    Args:
        fn: a function that returns a :class:`torch.futures.Future`. A remote call of it fails
            with a ``RuntimeError`` if it returns something else.

    Returns:
        The function, marked; called directly it returns the future as before. To type checkers a remote call of it
        has the type of the future's value.

    Raises:
        nothing here; the error of a future is the error of the call.

    Example::

        @rpc.functions.async_execution
        def add_there_and_here(to, x, y, z):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda sum: sum.wait() + z)

        rpc.rpc_sync("worker1", add_there_and_here, args=("worker2", torch.ones(2), 1, 1))
    """
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(async_execution(fn.__func__))

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):
        # It does not know its own name, by which the other end has to find this wrapper.
        module, _, name = fn.qualified_name.removeprefix("__torch__.").rpartition(".")
        wrapper.__module__, wrapper.__name__, wrapper.__qualname__ = module or "__main__", name, name

    # Bound methods, static and class methods pass attribute look-ups on to the function, so whoever
    # makes the call finds this however the function was reached.
    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
