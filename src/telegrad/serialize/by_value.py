"""Functions and classes that the other end cannot import, and so get their code sent along.

By reference (module and name) is the rule, as in pickle: it is short, and the function that runs is the receiver's own.
By value, which is cloudpickle's work, is for those that have no name to be found under: lambdas, closures, local
classes, what was defined in a notebook or at a prompt, and modules registered with
`cloudpickle.register_pickle_by_value`. Functions of a script's `__main__` go by reference: the other processes run
the same script.
"""

import copyreg
import io
import pickle
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import cloudpickle
from cloudpickle.cloudpickle import list_registry_pickle_by_value

# What a function's code is made of (cells, code objects, properties, ...). Not methods: cloudpickle would send the
# functions of class methods by value where a reference does.
_PARTS = {kind: reduce for kind, reduce in cloudpickle.Pickler.dispatch_table.items() if kind is not MethodType}


if TYPE_CHECKING:  # cloudpickle has no types
    from pickle import Pickler as _Pickler
else:
    from cloudpickle import Pickler as _Pickler


class ByValuePickler(_Pickler):
    """A pickler (protocol 5) that sends by value what cannot be found by name."""

    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[Any], object] | None = None) -> None:
        # Made anew each time, since users may register reducers at any moment; the C pickler is quick at a plain dict.
        # It looks for the table when it is initialized, and at no other time.
        self.dispatch_table: dict[Any, Any] = {**_PARTS, **copyreg.dispatch_table}
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)

    def dump(self, obj: object) -> None:
        pickle.Pickler.dump(self, obj)  # cloudpickle's own makes another error of RecursionError

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and not is_found_by_name(obj):
            return super().reducer_override(obj)
        return NotImplemented


def is_found_by_name(obj: Any) -> bool:
    """Whether module and qualified name of a function or class lead to it, in this process and in others."""
    module_name = obj.__module__
    if not is_importable(module_name):
        return False
    found: Any = sys.modules[module_name]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)  # "<locals>" and "<lambda>" lead nowhere
        if found is None:
            return False
    return found is obj


def is_importable(module_name: str) -> bool:
    """Whether what a module of this process defines is found by other processes too."""
    module = sys.modules.get(module_name)
    if module is None or (module_name == "__main__" and _is_at_a_prompt(module)):
        return False
    return not _is_registered_by_value(module_name)


def _is_at_a_prompt(main: object) -> bool:
    """Whether `__main__` is a notebook or an interactive session, whose definitions no other process can import."""
    return hasattr(sys, "ps1") and not hasattr(main, "__file__")


def _is_registered_by_value(module_name: str) -> bool:
    registered = list_registry_pickle_by_value()
    return bool(registered) and any(module_name == name or module_name.startswith(name + ".") for name in registered)
