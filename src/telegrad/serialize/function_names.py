"""Functions by name.

A function that can be found by its module and name is sent as that name. The core assigns it a small id, so the name is
sent once per connection. Caller and callee resolve the name at every call. So a function that is replaced in its module
(in a notebook, or patched by a test) is replaced for remote calls as well, as with pickle.
"""

import functools
import sys
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

from telegrad.serialize.module_imports import canonical, ensure_imported, import_parents_first
from telegrad.serialize.pickle_by_value import is_importable

__all__ = ["BY_VALUE", "NameTable", "NotByName", "parts_of", "path_of", "readable", "resolve", "resolver"]

_BY_PATH = b"G"  # module and dotted name
BY_VALUE = cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES  # the registry itself: checking it is cheap
_METHOD = b"M"  # the name of a method, for calls on a reference


class NotByName(LookupError):
    """The function cannot be found by name; it can only be sent by value."""


class _Known(NamedTuple):
    number: int
    text: bytes
    home: dict[str, object] | None  # namespace in which to check that the name still refers to the function
    module: str
    name: str
    path: str


class NameTable:
    """Names and numbers of the functions that one worker calls on others. Thread-safe."""

    def __init__(self) -> None:
        self.known: dict[Any, _Known] = {}  # also read by the core (csrc/python/prepare.h)
        self._holders: dict[bytes, object] = {}  # name -> the function that last had it
        self.methods: dict[str, tuple[int, bytes]] = {}
        self._lock = threading.Lock()
        self._next = 1

    def find(self, function: Any) -> tuple[int, bytes]:
        """Return the number and text of a function's name.

        Raises:
            NotByName: The function has no name, or the name refers to another object.
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
        """Return the number and text of a method's name."""
        found = self.methods.get(name)
        if found is None:
            with self._lock:
                found = self.methods.setdefault(name, (self._next, _METHOD + name.encode()))
                self._next += 1
        return found

    def texts(self) -> dict[int, bytes]:
        """Return the names by number. Takes no lock."""
        known = {entry.number: entry.text for entry in self.known.copy().values()}
        return known | dict(self.methods.copy().values())

    def _learn(self, function: object) -> _Known:
        home, module, path, text = _name_of(function)
        with self._lock:
            known = self.known.get(function)
            if known is None:
                # A name that refers to a new function, such as after a notebook's cell runs again, keeps its number.
                # The table drops its reference to the previous function.
                before = self.known.pop(self._holders.get(text), None)
                number = self._next if before is None else before.number
                self._next += before is None
                known = _Known(number, text, home, module, path.rpartition(".")[2], path)
                self.known[function] = known
                self._holders[text] = function
        return known


def _stands(function: object, home: dict[str, object], path: str) -> bool:
    try:
        found = functools.reduce(getattr, path.split(".")[1:], home[path.split(".", maxsplit=1)[0]])
    except (AttributeError, KeyError):
        return False
    # A class method is made at each access, those of builtin types too.
    return found is function or (type(found) in (MethodType, BuiltinFunctionType) and found == function)


def path_of(function: Any) -> tuple[str, str]:
    """Return the module and the dotted name by which a function can be found.

    Raises:
        NotByName: There is no such name, or it refers to another object.
    """
    kind = type(function)
    if kind is BuiltinFunctionType:
        return _path_of_builtin(function)
    if kind is FunctionType or isinstance(function, type):
        module, path = function.__module__, function.__qualname__
    elif kind is MethodType and isinstance(function.__self__, type):  # a class method
        module, path = function.__self__.__module__, f"{function.__self__.__qualname__}.{function.__name__}"
    else:
        raise NotByName
    if not _is_found(function, module, path) or not is_importable(module):
        raise NotByName
    return module, path


def _path_of_builtin(function: Any) -> tuple[str, str]:
    owner, name = function.__self__, function.__name__
    if isinstance(owner, ModuleType):
        places = [(function.__module__, name), (owner.__name__, name)]
    elif isinstance(owner, type):  # a class method
        places = [(owner.__module__, f"{owner.__qualname__}.{name}")]
    elif owner is None:  # torch's functions are static methods of a class, and the module torch has them
        places = [(function.__module__, name), (function.__module__, function.__qualname__)]
    else:
        raise NotByName  # a method of an object, such as [].append: the object must be sent
    for module, path in places:
        if module is not None and _is_found(function, module, path):
            return module, path
    raise NotByName


def _is_found(function: object, module: str, path: str) -> bool:
    home = getattr(sys.modules.get(module), "__dict__", None)
    return home is not None and "<" not in path and _stands(function, home, path)


def _name_of(function: Any) -> tuple[dict[str, Any] | None, str, str, bytes]:
    module, path = path_of(function)
    text = _BY_PATH + f"{module}\0{path}".encode()
    if type(function) is BuiltinFunctionType:  # not checked at each call
        return None, "", "", text
    return sys.modules[module].__dict__, module, path, text


def resolve(text: bytes) -> Any:
    """Return the function of a name; for a method's name, the string.

    Raises:
        AttributeError: The module does not have the name.
        ModuleNotFoundError: The module does not exist in this process. Importing it may raise other errors.
    """
    return resolver(text)()


def readable(text: bytes) -> str:
    """Return a name for people; imports nothing."""
    return text[1:].decode(errors="replace").replace("\0", ".")


def parts_of(text: bytes) -> tuple[str, str]:
    """Return module and dotted name in a function's name; a method has no module."""
    module, _, path = text[1:].decode(errors="replace").partition("\0")
    return ("", module) if text[:1] == _METHOD else (canonical(module), path)


def resolver(text: bytes) -> Callable[[], Any]:
    """Return a function that resolves the name at every call.

    Raises:
        AttributeError: As for `resolve`.
        ModuleNotFoundError: As for `resolve`.
    """
    found = _resolvers.get(text)
    if found is None:
        found = _resolvers[text] = _resolver(text)
    return found


_resolvers: dict[bytes, Callable[[], object]] = {}


def _resolver(text: bytes) -> Callable[[], object]:
    kind, rest = text[:1], text[1:]
    if kind == _METHOD:
        name = rest.decode()
        return lambda: name
    if kind != _BY_PATH:
        raise AttributeError(f"{text[:100]!r} is not the name of a function")
    module_name, _, path = rest.decode().partition("\0")
    ensure_imported(module_name)
    modules = sys.modules
    first, *others = path.split(".")

    def look_up() -> Any:
        try:
            found = modules[module_name].__dict__[first]
        except KeyError:  # the module may have a __getattr__; otherwise getattr raises a clear error
            found = getattr(import_parents_first(module_name), first)
        for name in others:
            found = getattr(found, name)
        return found

    function = look_up()
    if type(function) is BuiltinFunctionType:
        return lambda: function
    return look_up
