"""Search for the part of a value that cannot be pickled, for error messages."""

from collections.abc import Callable, Iterator, Mapping
from types import AsyncGeneratorType, FunctionType, GeneratorType, MethodType

# The search pickles parts of the value again. On huge values it stops at these limits and returns the part it has
# reached.
MOST_ATTEMPTS = 1000
MOST_STEPS = 30


def find_unpicklable(root: object, path: str, can_pickle: Callable[[object], bool]) -> tuple[str, object]:
    """Find the deepest part of `root` that cannot be pickled.

    Args:
        root: A value that cannot be pickled.
        path: Name of the value in the returned path.
        can_pickle: Returns whether one value can be pickled. Must not raise.

    Returns:
        The path to the part as a Python expression, and the part.
    """
    attempts = 0
    seen: set[int] = set()
    while id(root) not in seen and len(seen) < MOST_STEPS:  # a cycle would never end
        seen.add(id(root))
        for step, part in _parts(root):
            attempts += 1
            if attempts > MOST_ATTEMPTS:
                return path, root
            if not can_pickle(part):
                path, root = path + step, part
                break
    return path, root


def describe_type(part: object) -> str:
    """Return the name of a value's type, and how to send it if that is known."""
    kind = type(part)
    shown = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(part, (GeneratorType, AsyncGeneratorType)):
        shown += (
            ": read its items with rpc.stream, rref.stream().method or, from a RemoteModule, module.forward.stream"
            " instead, or send a list of the items"
        )
    return shown


def _parts(value: object) -> Iterator[tuple[str, object]]:
    match value:
        case tuple() | list():
            yield from ((f"[{i}]", item) for i, item in enumerate(value))
        case set() | frozenset():
            yield from ((f" (its element {_short(item)})", item) for item in value)
        case Mapping():
            for key, item in value.items():
                yield f" (its key {_short(key)})", key
                yield f"[{_short(key)}]", item
        case MethodType():
            yield ".__self__", value.__self__
        case FunctionType():
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
            for name, cell in cells:
                try:
                    yield f" (its variable {name})", cell.cell_contents
                except ValueError:  # not assigned yet
                    continue
            for name in value.__code__.co_names:
                if name in value.__globals__:
                    yield f" (its global {name})", value.__globals__[name]
    if not isinstance(value, FunctionType | type) and not _refuses(value):
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _refuses(value: object) -> bool:
    """Return whether an object itself refuses to be pickled."""
    try:
        value.__reduce_ex__(2)
    except Exception:
        return True
    return False


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # user code
        return f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"<{type(value).__name__}>"
