"""Functions by name.

A function that can be found by its module and name travels as that name, and the name only once per connection (the
core gives it a small id). Both ends look it up anew at every call, so that a function that is replaced in its module
(in a notebook, or by a test's patch) is replaced for callers as well, as with pickle.
"""

import functools
import importlib
import pickle
import sys
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

from telegrad.serialize.by_value import is_importable

__all__ = ["BY_VALUE", "NameTable", "NotByName", "resolve", "resolver"]

_BY_PATH = b"G"  # module and dotted name
_BY_PICKLE = b"P"  # what pickle makes of it; for torch's builtins, which have odd homes
BY_VALUE = cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES  # the registry itself: a look at it costs nothing
_METHOD = b"M"  # the name of a method, for calls on a reference


class NotByName(LookupError):
    """The function cannot be found by name; it has to travel by value or not at all."""


class _Known(NamedTuple):
    number: int
    text: bytes
    home: dict[str, Any] | None  # where to check that it still stands under its name
    module: str
    name: str
    path: str


class NameTable:
    """Gives names and numbers to the functions that one worker calls elsewhere. Thread-safe."""

    def __init__(self) -> None:
        self.known: dict[Any, _Known] = {}  # the core looks there, too (csrc/bind/direct.h)
        self._holders: dict[bytes, Any] = {}  # who stands under each name, last we knew
        self._methods: dict[str, tuple[int, bytes]] = {}
        self._lock = threading.Lock()
        self._next = 1

    def find(self, function: Any) -> tuple[int, bytes]:
        """The number and text of a function's name.

        Raises:
            NotByName: it has none, or another object stands under it.
        """
        try:
            known = self.known.get(function)
        except TypeError:  # not hashable
            raise NotByName from None
        if known is None:
            known = self._learn(function)
        home = known.home
        if home is not None:
            if home.get(known.name) is not function and not _stands(function, home, known.path):
                raise NotByName
            if BY_VALUE and not is_importable(known.module):
                raise NotByName
        return known.number, known.text

    def method(self, name: str) -> tuple[int, bytes]:
        """The number and text of a method's name."""
        found = self._methods.get(name)
        if found is None:
            with self._lock:
                found = self._methods.setdefault(name, (self._next, _METHOD + name.encode()))
                self._next += 1
        return found

    def _learn(self, function: Any) -> _Known:
        home, module, path, text = _name_of(function)
        with self._lock:
            known = self.known.get(function)
            if known is None:
                # A name that has changed its meaning, as a notebook's cell does when it is run again, keeps its number;
                # the function that had it is let go.
                before = self.known.pop(self._holders.get(text), None)
                number = self._next if before is None else before.number
                self._next += before is None
                known = _Known(number, text, home, module, path.rpartition(".")[2], path)
                self.known[function] = known
                self._holders[text] = function
        return known


def _stands(function: Any, home: dict[str, Any], path: str) -> bool:
    try:
        found = functools.reduce(getattr, path.split(".")[1:], home[path.split(".", maxsplit=1)[0]])
    except (AttributeError, KeyError):
        return False
    return found is function or (type(found) is MethodType and found == function)


def _name_of(function: Any) -> tuple[dict[str, Any] | None, str, str, bytes]:
    kind = type(function)
    if kind is FunctionType or isinstance(function, type):
        module, path = function.__module__, function.__qualname__
    elif kind is MethodType and isinstance(function.__self__, type):  # a class method
        module, path = function.__self__.__module__, f"{function.__self__.__qualname__}.{function.__name__}"
    elif kind is BuiltinFunctionType:
        owner = function.__self__
        if not isinstance(owner, (ModuleType, type, type(None))):
            raise NotByName  # a method of some object, such as [].append: the object has to travel
        return None, "", "", _BY_PICKLE + _pickled(function)
    else:
        raise NotByName
    home = getattr(sys.modules.get(module), "__dict__", None)
    if home is None or "<" in path or not _stands(function, home, path) or not is_importable(module):
        raise NotByName
    return home, module, path, _BY_PATH + f"{module}\0{path}".encode()


def _pickled(function: Any) -> bytes:
    try:
        return pickle.dumps(function, protocol=5)
    except Exception:
        raise NotByName from None


def resolve(text: bytes) -> Any:
    """The function of a name, or for a method's name the string.

    Raises:
        AttributeError, ModuleNotFoundError, ...: it is not here.
    """
    return resolver(text)()


def resolver(text: bytes) -> Callable[[], Any]:
    """What finds it, anew at every call.

    Raises: as `resolve`.
    """
    found = _resolvers.get(text)
    if found is None:
        found = _resolvers[text] = _resolver(text)
    return found


_resolvers: dict[bytes, Callable[[], Any]] = {}


def _resolver(text: bytes) -> Callable[[], Any]:
    kind, rest = text[:1], text[1:]
    if kind == _METHOD:
        name = rest.decode()
        return lambda: name
    if kind == _BY_PICKLE:
        function = pickle.loads(rest)
        return lambda: function
    module_name, _, path = rest.decode().partition("\0")
    if module_name not in sys.modules:
        importlib.import_module(module_name)
    modules = sys.modules
    first, *others = path.split(".")

    def look_up() -> Any:
        try:
            found = modules[module_name].__dict__[first]
        except KeyError:  # a module's __getattr__, or the clear error
            found = getattr(importlib.import_module(module_name), first)
        for name in others:
            found = getattr(found, name)
        return found

    look_up()
    return look_up
