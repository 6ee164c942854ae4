"""Exposure of functions of this process to other workers."""

from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar, overload

from telegrad.serialize.function_names import NotByName, path_of
from telegrad.worker.serving.exposure import exposed

__all__ = ["expose"]

C = TypeVar("C", bound=Callable[..., Any])


@overload
def expose(target: str, /) -> None: ...
@overload
def expose(target: C, /) -> C: ...


def expose(target: Any, /) -> Any:
    """Let other workers call a function, a class or a method of this process.

    Workers with the option ``expose="listed"`` run only what is exposed, others run everything. A call of anything else
    fails with `telegrad.errors.NotExposed`, before anything is imported for it or decoded. The list belongs to the
    process. Telegrad's own functions for streams, maps, optimizers, remote modules and groups are always allowed; the
    program's functions, methods, modules and losses that they run have to be exposed.

    A class is exposed with the public methods, properties, attributes and classes that it defines itself, but not with
    functions of other modules that are among its attributes. Its objects may be called. For inherited members, expose
    them or the class that defines them.

    In a name, a wildcard stands for part of one component between dots that does not begin with an underscore.
    A pattern exposes what the module or class defines, and nothing that it has imported or inherited. A name without
    wildcards exposes whatever it refers to. If its module has imported the function or class, and is imported already,
    the name exposes the place of definition as well: callers send that one.

    The list alone does not stop members that attack: the arguments of an exposed function may be pickles, which can run
    any code. Add the option ``allow_pickle=False``.

    Args:
        target: a function or class, also as a decorator, or the text ``"package.module:name"``. The name may have dots,
            as in ``"models:Net.forward"``, and both parts the wildcards of ``fnmatch``, as in ``"serving.api:get_*"``.

    Returns:
        The function or class; None for a text.

    Raises:
        TypeError: the target is neither a text, nor a function or class.
        ValueError: the text has not the form ``"module:name"``, or other processes cannot find the function by a name.

    Example::

        import math

        @rpc.expose
        def add(x, y):
            return x + y

        rpc.expose("math:sqrt")
        with cluster(2, rpc.Options(expose="listed")):
            print(rpc.rpc_sync("w1", math.sqrt, args=(4.0,)))  # 2.0
    """
    if isinstance(target, str):
        module, separator, path = target.partition(":")
        if not module or not path or not separator or ":" in path:
            raise ValueError(f'rpc.expose takes "package.module:name", and got {target!r}')
        exposed.add(module, path)
        return None
    if isinstance(target, partial) or not isinstance(target, FunctionType | BuiltinFunctionType | MethodType | type):
        raise TypeError(f"rpc.expose takes a function, a class or a text, and got {target!r:.100}")
    module, path = _path(target)
    exposed.add(module, path)
    if isinstance(target, type):
        exposed.add(module, f"{path}.*")
    return target


def _path(target: Any) -> tuple[str, str]:
    """Return the place of a function or class that its module may not have yet."""
    if isinstance(target, FunctionType | type):
        module, path = target.__module__, target.__qualname__
        if "<" in path:
            raise ValueError(f"{path} cannot be exposed: other processes find only what a module or a class defines")
        return module, path
    try:
        return path_of(target)
    except NotByName:
        raise ValueError(f"{target!r:.100} cannot be exposed: it is not found by a name in its module") from None
