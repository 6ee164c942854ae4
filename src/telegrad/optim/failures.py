"""Exception that combines the failures of several workers."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from telegrad.errors import is_drop_in

__all__ = ["all_of"]


def all_of(what: str, failures: Sequence[tuple[str, Exception]]) -> Exception:
    """Return one exception for all failures.

    It is an `ExceptionGroup` of the given exceptions, and of all their types. An `OSError`, such as `RpcTimeout`,
    cannot be combined with a group: instead of its type, the group has the bases that can, such as `TelegradError`.

    Args:
        what: what failed, for the text.
        failures: names of workers and their exceptions; at least one.

    Returns:
        The exception itself if there is only one. If all are of `OSError`, or a type cannot be combined, such as
        `UnicodeDecodeError`, the last exception, with the others in its notes.
    """
    errors = [error for _, error in failures]
    last = errors[-1]
    if len(errors) == 1:
        return last
    message = f"{what} on {len(errors)} workers: " + "; ".join(f"{name}: {_first_line(e)}" for name, e in failures)
    group: Exception | None = None
    if not all(isinstance(error, OSError) for error in errors):
        with suppress(TypeError):
            group = _again(message, errors)
    if group is None:
        last.add_note(f"{message}. This is the last of them.")
        return last
    for error in errors:
        for name, value in error.__dict__.items():
            if not name.startswith("_"):
                group.__dict__[name] = value
    if is_drop_in():  # drop-in programs expect tracebacks in texts
        group.add_note(message + "".join(f"\n\n{name}: {error}" for name, error in failures))
    return group


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A remote error's text begins with "On WorkerInfo(...):"; its next line is the repr.
    text = lines[1] if len(lines) > 1 and lines[0].startswith("On WorkerInfo") else "".join(lines[:1])
    return text if type(error).__name__ in text else f"{type(error).__name__}: {text}"


def _group_class(given: Sequence[type[Exception]]) -> Any:
    kinds = dict.fromkeys(given)
    bases = [kind for kind in kinds if not any(other is not kind and issubclass(other, kind) for other in kinds)]
    members: dict[str, Any] = {
        "__module__": __name__,
        "__init__": lambda self, message, errors: None,  # the types' own take other arguments
        "__str__": lambda self: "\n".join([self.message, *(str(error) for error in self.exceptions)]),
        "__reduce__": lambda self: (_again, (self.message, list(self.exceptions))),
        "derive": lambda self, errors: _again(self.message, list(errors)),
    }
    return type("SeveralErrors", (ExceptionGroup, *bases), members)


def _again(message: str, errors: list[Exception]) -> Exception:
    kinds = [type(error) for error in errors]
    try:
        of_all = _group_class(kinds)
    except TypeError:
        of_all = _group_class([base for kind in kinds for base in _bases_for_group(kind)])
    group: Exception = of_all(message, errors)
    return group


def _bases_for_group(kind: type[Exception]) -> list[type[Exception]]:
    """Return the type, or the bases of an OSError that a group can have."""
    if not issubclass(kind, OSError):
        return [kind]
    return [base for base in kind.__mro__ if issubclass(base, Exception) and not issubclass(base, OSError)]
