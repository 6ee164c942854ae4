"""Pickling by value of functions and classes that the receiver cannot import.

By default a function is sent by reference (module and name), as in pickle: the message is short, and the receiver runs
its own definition. cloudpickle sends by value functions and classes that cannot be found by name: lambdas, closures,
local classes, definitions of a notebook or an interactive session, and modules registered with
`cloudpickle.register_pickle_by_value`. Functions of a script's `__main__` are sent by reference, because the other
processes run the same script.
"""

import copyreg
import functools
import io
import pickle
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import cloudpickle
from cloudpickle.cloudpickle import list_registry_pickle_by_value

# Parts of a function's code: cells, code objects, properties and so on. Methods are excluded: cloudpickle would send
# the functions of class methods by value even if a reference is enough.
_PARTS = {kind: reduce for kind, reduce in cloudpickle.Pickler.dispatch_table.items() if kind is not MethodType}


if TYPE_CHECKING:  # cloudpickle has no types
    from pickle import Pickler as _Pickler
else:
    from cloudpickle import Pickler as _Pickler


class ByValuePickler(_Pickler):
    """Pickler (protocol 5) that sends by value what cannot be found by name."""

    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[Any], object] | None = None) -> None:
        # Built for each pickler, because programs may register reducers at any time. A plain dict is the fastest for
        # the C pickler, which reads the attribute only while it is initialized.
        self.dispatch_table: dict[Any, Any] = {**_PARTS, **copyreg.dispatch_table}
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)

    def dump(self, obj: object) -> None:
        pickle.Pickler.dump(self, obj)  # cloudpickle's `dump` replaces RecursionError by another error

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, FunctionType | type) and not is_found_by_name(obj):
            original = _compiled_from(obj)
            return super().reducer_override(obj) if original is None else (_uncompiled, (original,))
        if type(obj) is _CACHED and not is_found_by_name(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return NotImplemented


_CACHED = type(functools.lru_cache(print))


def _compiled_from(obj: Any) -> object | None:
    """Return the function that `torch.compile` has wrapped as `obj`, or None.

    The attribute alone says nothing: `functools.wraps` copies it.
    """
    is_of_dynamo = isinstance(obj, FunctionType) and obj.__globals__.get("__name__") == "torch._dynamo.eval_frame"
    return getattr(obj, "_torchdynamo_orig_callable", None) if is_of_dynamo else None


def _uncompiled(function: object) -> object:
    """Return the function: it would be compiled again for each message."""
    return function


def _cached(function: Callable[..., object], parameters: dict[str, Any]) -> object:
    """Return the function with a cache of its own, which is empty."""
    return functools.lru_cache(**parameters)(function)


def is_found_by_name(obj: Any) -> bool:
    """Return whether a function or class is found by module and qualified name.

    The answer holds for this process and for others that import the module.
    """
    module_name = obj.__module__
    if not is_importable(module_name):
        return False
    found: Any = sys.modules[module_name]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)  # None for "<locals>" and "<lambda>"
        if found is None:
            return False
    return found is obj


def is_importable(module_name: str) -> bool:
    """Return whether other processes can import the definitions of a module."""
    module = sys.modules.get(module_name)
    if module is None or (module_name == "__main__" and _is_at_a_prompt(module)):
        return False
    return not _is_registered_by_value(module_name)


def _is_at_a_prompt(main: object) -> bool:
    """Return whether `__main__` is a notebook or an interactive session.

    Other processes cannot import its definitions.
    """
    return hasattr(sys, "ps1") and not hasattr(main, "__file__")


def _is_registered_by_value(module_name: str) -> bool:
    registered = list_registry_pickle_by_value()
    return bool(registered) and any(module_name == name or module_name.startswith(name + ".") for name in registered)
