"""Names of the methods that a module has by its class.

A worker that knows them takes an attribute of a remote module for a method without a request to the owner.
"""

from functools import partial, partialmethod, singledispatchmethod
from types import BuiltinFunctionType, FunctionType

from torch import nn

__all__ = ["class_made_by", "method_names"]

_METHODS = (FunctionType, BuiltinFunctionType, partialmethod, singledispatchmethod)
_NEW: object = object.__new__
_GET: object = object.__getattribute__


def class_made_by(creator: object) -> type | None:
    """Return the class of the object that a callable returns.

    None if that cannot be known without calling it.
    """
    while isinstance(creator, partial):
        creator = creator.func
    if not isinstance(creator, type) or type(creator).__call__ is not type.__call__:
        return None
    return creator if creator.__new__ is _NEW else None


def method_names(kind: type) -> tuple[str, ...]:
    """Return the names of a class's methods, without those of every module.

    Properties and other attributes are left out, because their values may change. A class with a `__getattribute__` of
    its own has no names: any attribute may be anything.
    """
    if kind.__getattribute__ is not _GET:
        return ()
    members: dict[str, object] = {}
    for each in reversed(kind.__mro__):
        if each not in nn.Module.__mro__:
            members.update(vars(each))
    return tuple(name for name, member in members.items() if _is_own_method(name, member))


def _is_own_method(name: str, member: object) -> bool:
    if name.startswith("__") or hasattr(nn.Module, name):
        return False
    return isinstance(member.__func__ if isinstance(member, (staticmethod, classmethod)) else member, _METHODS)
