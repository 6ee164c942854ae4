"""Stand-ins for names that Telegrad does not have yet: they import, and every use of them says so."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["unbuilt"]


def unbuilt(module: str, part: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for a module.

    Args:
        module: the module's name.
        part: what is missing, in the user's words.
    """

    @functools.cache
    def getattribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def refuse(*_args: object, **_kwargs: object) -> NoReturn:
            raise NotImplementedError(f"{module}.{name}: Telegrad has no {part} yet")

        if name.lstrip("_")[:1].isupper():  # a class: it may be derived from and asked about, but not made
            return type(name, (), {"__new__": refuse, "__module__": module})
        refuse.__name__ = name
        return refuse

    return getattribute
