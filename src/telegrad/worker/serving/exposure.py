"""Allow-list of callables: what other workers may call on this one.

A worker with the option ``expose="listed"`` runs only functions and methods that the program has exposed
(`telegrad.rpc.expose`), and those of Telegrad itself in `telegrad.worker.serving.own_functions`. The check is made with
the names in a request, before anything is imported or unpickled for it. The name of a method is checked again with the
class of its receiver, which the body names.

The names of the program belong to the process, because decorators add them before there is a worker.
"""

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NoReturn, TypeAlias

import torch

from telegrad.errors import NotExposed
from telegrad.serialize.function_names import NotByName, parts_of, path_of, resolver
from telegrad.serialize.module_imports import canonical
from telegrad.worker.calls.callables import find_function, found, method_of
from telegrad.worker.calls.interceptors import internal
from telegrad.worker.serving.own_functions import METHODS_OF_MODULES, OWN_FUNCTIONS

__all__ = ["ALLOW_ALL", "AllowAll", "AllowList", "ExposedNames", "exposed"]

Path: TypeAlias = tuple[str, str]
"""Module and dotted name."""

_BY_VALUE = (
    "Lambdas, closures, partial objects and callable objects such as numpy.mean have no name that could be exposed:"
    " call a function of a module that calls it, and expose that one."
)

_TYPE: Path = ("builtins", "type")


class ExposedNames:
    """Names and patterns of the functions that a program has exposed.

    A pattern has wildcards of `fnmatch`. They stand for part of one component of a dotted name that does not begin with
    an underscore, and only for what the module or class itself defines.
    """

    def __init__(self) -> None:
        self._names: set[Path] = set()
        self._places: set[Path] = set()  # of definition, of what names refer to: calls are sent by these
        self._patterns: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()

    def add(self, module: str, path: str) -> None:
        """Expose a name, or a pattern if it has wildcards."""
        module = canonical(module)
        if any(wildcard in module + path for wildcard in "*?["):
            self._patterns.add((tuple(module.split(".")), tuple(path.split("."))))
            return
        self._names.add((module, path))
        if (place := _place_of(module, path)) is not None:
            self._places.add(place)

    def remove(self, module: str, path: str) -> None:
        """Remove what `add` has added."""
        module = canonical(module)
        self._names.discard((module, path))
        if (place := _place_of(module, path)) is not None:
            self._places.discard(place)
        self._patterns.discard((tuple(module.split(".")), tuple(path.split("."))))

    def has_name(self, path: Path) -> bool:
        """Return whether a name was exposed, as it is or by another name."""
        path = canonical(path[0]), path[1]
        return path in self._names or path in self._places

    def has_pattern(self, path: Path) -> bool:
        """Return whether a pattern matches a name."""
        module, name = canonical(path[0]).split("."), path[1].split(".")
        return any(_matches(module, modules) and _matches(name, names) for modules, names in self._patterns.copy())

    def may_have_method(self, name: str) -> bool:
        """Return whether some class may have an exposed method of this name."""
        if name == "__call__":
            return True
        names, patterns = self._names.copy(), self._patterns.copy()
        return any(path.rpartition(".")[2] == name for _, path in names) or any(
            _matches([name], parts[-1:]) for _, parts in patterns
        )


def _place_of(module: str, path: str) -> Path | None:
    """Return another place, at which the object of a name is defined, or None.

    Imports nothing. A function that a class defines has none: its place would expose a method of all subclasses.
    """
    *owners, name = path.split(".")
    home: object = sys.modules.get(module)
    try:
        for each in owners:
            home = vars(home)[each]
        target = vars(home)[name]
        if isinstance(home, type):
            outer = path_of(home)
            place = canonical(outer[0]), f"{outer[1]}.{name}"
        else:
            outer = path_of(target)
            place = canonical(outer[0]), outer[1]
    except (KeyError, TypeError, NotByName):  # not imported, inherited, or without a name
        return None
    is_method = "." in place[1] and not isinstance(home, type) and not isinstance(target, type)
    return None if place == (module, path) or is_method else place


def _matches(parts: list[str], patterns: tuple[str, ...]) -> bool:
    return len(parts) == len(patterns) and all(
        part == pattern or (part[:1] not in ("", "_") and fnmatchcase(part, pattern))
        for part, pattern in zip(parts, patterns, strict=True)
    )


exposed: ExposedNames = ExposedNames()
"""Names that the program of this process has exposed."""


class AllowAll:
    """Policy of a worker that exposes everything."""

    admit: None = None
    resolver: Callable[[bytes], Callable[[], object]] = staticmethod(resolver)
    find_function: Callable[[bytes], object] = staticmethod(find_function)
    method_of: Callable[[object, str], Any] = staticmethod(method_of)

    def callee_of(self, function: bytes | Callable[..., object]) -> Any:
        """Return a function that a request carries as an argument: as a name, or itself."""
        return found(function)

    def read(self, value: object, name: str) -> Any:
        """Return an attribute of a referenced value."""
        return getattr(value, name)

    def method_of_module(self, value: torch.nn.Module, name: str) -> Any:
        """Return a method of a remote module."""
        return getattr(value, name)


class AllowList:
    """Policy of a worker that exposes only what is listed.

    Args:
        worker: Name of the worker, for errors.
        names: What the program has exposed.
    """

    def __init__(self, worker: str, names: ExposedNames = exposed) -> None:
        self._worker = worker
        self._names = names

    def admit(self, text: bytes | None) -> None:
        """Check the function's name in a request, before anything else is read.

        Args:
            text: The name of a function or method; None for a function by value.

        Raises:
            NotExposed: The function is not exposed, or no method of this name is.
        """
        if text is None:
            raise NotExposed(self._worker, "a function sent by value", _BY_VALUE)
        path = parts_of(text)
        if not path[0]:
            if not self._names.may_have_method(path[1]):
                self._refuse(f"method {path[1]!r}", f'"package.module:Class.{path[1]}"')
        elif not self._has(path):
            if not self._names.has_pattern(path):
                self._refuse_path(path)
            self._defined(find_function(text), path)

    def require_listed(self, module: str, path: str) -> None:
        """Check a name that no pattern covers.

        Raises:
            NotExposed: The name is not exposed.
        """
        if not self._names.has_name((module, path)):
            self._refuse_path((module, path))

    def resolver(self, text: bytes) -> Callable[[], object]:
        """Return a function that resolves an exposed name, as `function_names.resolver`."""
        self.admit(text)
        path = parts_of(text)
        if path == _TYPE:
            return lambda: _type_of
        look_up = resolver(text)
        if not path[0] or self._has(path):
            return look_up
        return lambda: self._defined(look_up(), path)

    def find_function(self, text: bytes) -> object:
        """Return an exposed function by its name, as `callables.find_function`."""
        self.admit(text)
        path = parts_of(text)
        return _type_of if path == _TYPE else self._defined(find_function(text), path)

    def callee_of(self, function: bytes | Callable[..., object]) -> Any:
        """Return a function that a request carries as an argument, if it is exposed."""
        if isinstance(function, bytes):
            return self.find_function(function)
        try:
            path = path_of(function)
        except NotByName:
            if isinstance(function, FunctionType | type):
                self.admit(None)
            if isinstance(function, MethodType):
                return self.method_of(function.__self__, function.__name__)
            return self.method_of(function, "__call__")
        return self.find_function(f"G{path[0]}\0{path[1]}".encode())

    def method_of(self, value: object, name: str) -> Any:
        """Return a method of a referenced value, if it is exposed.

        Raises:
            NotExposed: Neither the class nor the one that defines the method exposes it.
            Exception: As `callables.method_of`.
        """
        self._require_member(value, name)
        return method_of(value, name)

    def read(self, value: object, name: str) -> Any:
        """Return an attribute of a referenced value, if it is exposed."""
        self._require_member(value, name)
        return getattr(value, name)

    def method_of_module(self, value: torch.nn.Module, name: str) -> Any:
        """Return a method of a remote module: one of torch, or one that is exposed."""
        if name not in METHODS_OF_MODULES or not _has_method_of_torch(value, name):
            self._require_member(value, name)
        elif name == "get_submodule":
            return partial(_submodule, value)
        return getattr(value, name)

    def _has(self, path: Path) -> bool:
        """Return whether a name is listed as it is."""
        return self._names.has_name(path) or ":".join(path) in OWN_FUNCTIONS

    def _defined(self, function: object, path: Path) -> object:
        """Return a function that was found by its name, if the name exposes it.

        A module may have imported the function. Then a pattern exposes it by the place of its definition only.
        """
        place = (canonical(getattr(function, "__module__", "")), getattr(function, "__qualname__", None))
        if path[0] and place != path and not self._has(path):
            self._refuse_path(path)
        return function

    def _require_member(self, value: object, name: str) -> None:
        owner: type = value if isinstance(value, type) else type(value)
        definer = next((each for each in owner.__mro__ if name in each.__dict__), None)
        for kind in (owner, definer):
            if kind is not None and self._names.has_name((kind.__module__, f"{kind.__qualname__}.{name}")):
                return
        if (
            definer is not None
            and self._names.has_pattern((definer.__module__, f"{definer.__qualname__}.{name}"))
            and not _is_borrowed(definer, name)
        ):
            return
        if name == "__call__" and owner is not value and self._names.has_name((owner.__module__, owner.__qualname__)):
            return  # the class is exposed, and its objects are made to be called
        self._refuse(
            f"{name!r} of {owner.__module__}.{owner.__qualname__}", f'"{owner.__module__}:{owner.__qualname__}.{name}"'
        )

    def _refuse_path(self, path: Path) -> NoReturn:
        self._refuse(f"{path[0]}.{path[1]}", f'"{path[0]}:{path[1]}"')

    def _refuse(self, what: str, name: str) -> NoReturn:
        raise NotExposed(self._worker, what, f"There, decorate it with @rpc.expose, or call rpc.expose({name}).")


def _is_borrowed(definer: type, name: str) -> bool:
    """Return whether a member is a function or class of another module.

    An example is ``load = pickle.loads``.
    """
    member = definer.__dict__[name]
    member = getattr(member, "__func__", member)  # of a class method or static method
    home = canonical(getattr(member, "__module__", None) or definer.__module__)
    is_elsewhere = callable(member) and home != canonical(definer.__module__)
    return is_elsewhere and getattr(member, "__qualname__", "") != f"{definer.__qualname__}.{name}"


def _has_method_of_torch(value: object, name: str) -> bool:
    """Return whether a module has torch's method of this name, not an override."""
    if not isinstance(value, torch.nn.Module) or name in value.__dict__:
        return False
    definer = next((each for each in type(value).__mro__ if name in each.__dict__), None)
    return definer is not None and definer.__module__.partition(".")[0] == "torch"


def _submodule(module: torch.nn.Module, target: str) -> torch.nn.Module:
    """Return a submodule, as `torch.nn.Module.get_submodule`.

    Reads no attribute: it may be a property.

    Raises:
        AttributeError: There is no such submodule.
    """
    for name in target.split(".") if target else ():
        # A scripted module has no `get`; a name may be registered without a module.
        if name not in module._modules or (child := module._modules[name]) is None:
            raise AttributeError(f"{type(module).__name__} has no submodule `{name}`")
        module = child
    return module


def _type_of(value: object) -> type:
    return type(value)


internal.add(_type_of)


ALLOW_ALL = AllowAll()
