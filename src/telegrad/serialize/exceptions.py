"""Exceptions on their way from the worker that raised them to the one that waits.

What is sent is enough to do well by everybody: the pickled exception (if it can be pickled), its
type by name, its ``repr`` and traceback as text. At the other end the exception is made again, of
a class that is both the original type and a :class:`~telegrad.errors.RemoteError`, so that old
programs that catch ``RuntimeError`` and new ones that catch ``KeyError`` are both served.
"""

import copy
import functools
import io
import pickle
import re
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad.errors import RemoteError
from telegrad.types import WorkerInfo

__all__ = [
    "RemoteTraceback",
    "afresh",
    "describe_exception",
    "forget_frames",
    "is_interrupt",
    "let_go_of_frames",
    "pack_exception",
    "text_of",
    "unpack_exception",
]


class _Packed(NamedTuple):
    """What is sent."""

    worker: str
    worker_id: int
    type_name: str  # with its module
    shown: str  # repr()
    traceback: str
    pickled: bytes | None
    why_not: str  # if it could not be pickled: the reason


class RemoteTraceback(Exception):
    """The traceback of another process, as text. It is the ``__cause__`` of the exceptions that come from there."""

    def __str__(self) -> str:
        worker, worker_id, trace = self.args
        return f'on worker {worker} (rank {worker_id})\n"""\n{trace}"""'


# An escape as repr() writes them, but for quotes.
_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt\\])")


def _unescaped(text: str) -> str:
    """Undoes repr()'s escapes and nothing else, so line breaks are line breaks and other letters stay whole."""
    return _ESCAPE.sub(lambda m: m[0].encode("ascii").decode("unicode_escape"), text)


def _type_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _repr(exc: BaseException) -> str:
    try:
        return repr(exc)
    except BaseException as e:
        return f"<{_type_name(type(exc))}, whose repr() raised {type(e).__name__}>"


def text_of(exc: BaseException) -> str:
    """Return ``str(exc)``, or the name of its type where ``__str__`` raises."""
    try:
        return str(exc)
    except BaseException:
        return _type_name(type(exc))


def is_interrupt(exc: BaseException) -> bool:
    """Tell whether a signal handler may have raised the exception: then the calling thread, the main one, must raise
    it. Elsewhere user code has raised it, such as SystemExit while a value was unpickled."""
    return not isinstance(exc, Exception) and threading.current_thread() is threading.main_thread()


def let_go_of_frames(exc: BaseException, worker: WorkerInfo) -> None:
    """Keeps an exception's traceback as text only. For one that is to be raised again, maybe much later: its frames
    would keep all variables of the failed call alive."""
    text = exc.__dict__[_TRACEBACK] = _formatted(exc)
    if exc.__cause__ is None:
        exc.__cause__ = RemoteTraceback(worker.name, worker.id, text)
    forget_frames(exc)


def forget_frames(exc: BaseException) -> None:
    """Takes the tracebacks of an exception and of those that led to it."""
    todo: list[BaseException | None] = [exc]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += (one.__cause__, one.__context__)


def afresh(exc: BaseException) -> BaseException:
    """A copy of an exception that is kept and may be raised often. Raising it itself would hang the frames of whoever
    asks, with all their variables, on what keeps it."""
    try:
        again = copy.copy(exc)
        if type(again) is not type(exc):
            raise TypeError(f"a copy of {_type_name(type(exc))} is something else")
    except Exception:  # its class cannot be made from its args
        return exc.with_traceback(None)
    if again.__cause__ is None:
        again.__cause__ = exc.__cause__
    again.__suppress_context__ = True
    return again


_TRACEBACK = "_telegrad_traceback"


def _formatted(exc: BaseException) -> str:
    kept = exc.__dict__.get(_TRACEBACK)
    if isinstance(kept, str):
        return kept
    try:
        return "".join(traceback.format_exception(exc))
    except BaseException:  # an exception whose __str__ or __cause__ is broken
        return "".join(traceback.format_tb(exc.__traceback__)) + _repr(exc) + "\n"


def describe_exception(exc: BaseException, worker: WorkerInfo) -> str:
    """The text for the log of the worker on which it was raised; what ``str()`` gives at the other end."""
    return _text(worker.name, worker.id, _repr(exc), _formatted(exc))


def _text(worker: str, worker_id: int, shown: str, trace: str) -> str:
    return f"On {WorkerInfo(worker, worker_id)}:\n{_unescaped(shown)}\n{trace}"


def pack_exception(exc: BaseException, worker_info: WorkerInfo) -> bytes:
    """Makes bytes of an exception. Never raises.

    Args:
        exc: what user code raised. Called while its traceback is still attached.
        worker_info: the worker on which it was raised.
    """
    # One that came from a third worker goes on as the type that was raised there.
    origin = exc.__dict__.get("_origin")
    if isinstance(exc, RemoteError) and isinstance(origin, _Packed):
        type_name, pickled, why_not = origin.type_name, origin.pickled, origin.why_not
    else:
        type_name, (pickled, why_not) = _type_name(type(exc)), _pickled(exc)
    return pickle.dumps(
        tuple(_Packed(worker_info.name, worker_info.id, type_name, _repr(exc), _formatted(exc), pickled, why_not)),
        protocol=5,
    )


def _pickled(exc: BaseException) -> tuple[bytes | None, str]:
    try:
        return pickle.dumps(exc, protocol=5), ""
    except BaseException as e:
        return None, f"it could not be pickled there ({type(e).__name__}: {text_of(e)})"


def unpack_exception(data: bytes) -> BaseException:
    """Makes the exception again, with the remote traceback as its ``__cause__``. Never raises on what
    :func:`pack_exception` made.

    Returns:
        An exception that is a :class:`~telegrad.errors.RemoteError`, and of the original type as well if that could
        be made again. ``raise`` it as it is, or give it to ``Future.set_exception``.
    """
    packed = _Packed(*pickle.loads(data))
    text = _text(packed.worker, packed.worker_id, packed.shown, packed.traceback)
    try:
        exc = _made_again(packed, _remote_class)
    except BaseException as e:
        if is_interrupt(e):
            raise
        why = packed.why_not or f"{type(e).__name__}: {text_of(e)}"
        try:
            exc = _made_again(packed, _without_constructor)
            text += (
                f"Made without its constructor, which takes other arguments than its args ({why})."
                f" Original exception on remote side was {packed.type_name}.\n"
            )
        except BaseException as again:
            if is_interrupt(again):
                raise
            exc = RemoteError(packed.shown)
            text = (
                f"Failed to create original exception type. Error msg was {why}"
                f" Original exception on remote side was {text}"
            )
    exc.__dict__.pop(_TRACEBACK, None)
    exc.worker = packed.worker
    exc.worker_id = packed.worker_id
    exc.original_type = packed.type_name
    exc.remote_traceback = packed.traceback
    exc._text = text
    exc.__dict__["_origin"] = packed
    exc.__cause__ = RemoteTraceback(packed.worker, packed.worker_id, packed.traceback)
    return exc


class _ClassUnpickler(pickle.Unpickler):
    """Unpickles an exception, but makes it by what `maker_of` gives for its class."""

    def __init__(self, data: bytes, type_name: str, maker_of: Callable[[type[Exception]], Callable[..., Any]]) -> None:
        super().__init__(io.BytesIO(data))
        self._type_name = type_name
        self._maker_of = maker_of

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if isinstance(found, type) and issubclass(found, Exception) and _type_name(found) == self._type_name:
            return self._maker_of(found)
        return found


def _without_constructor(original: type[Exception]) -> Callable[..., RemoteError]:
    """Makes an exception of args that its constructor does not take: ``__init__(self, a, b)`` that gives one text to
    ``super().__init__``, say. Its attributes come with its ``__dict__``."""
    made = _remote_class(original)  # type: ignore[arg-type]  # types are hashable

    def make(*args: Any) -> RemoteError:
        exc = made.__new__(made, *args)
        exc.args = args
        return exc

    return make


def _made_again(packed: _Packed, maker_of: Callable[..., Callable[..., Any]]) -> RemoteError:
    if packed.pickled is None:
        raise TypeError(packed.why_not)
    exc = _ClassUnpickler(packed.pickled, packed.type_name, maker_of).load()
    if isinstance(exc, Exception) and not isinstance(exc, RemoteError):  # a function has made it, not its class
        exc.__class__ = _remote_class(type(exc))  # type: ignore[arg-type]  # types are hashable
    if not isinstance(exc, RemoteError):
        # SystemExit and its like must not end the caller, and whatever a __reduce__ made instead is no exception.
        raise TypeError(f"{packed.type_name} cannot be raised at a distance")
    return exc


@functools.lru_cache(maxsize=256)
def _remote_class(original: type[Exception]) -> type[RemoteError]:
    """The class that is both ``original`` and a RemoteError.

    The original comes first among its bases, so that its constructor, attributes and methods are
    in force; only how it is shown and pickled is the RemoteError's.
    """
    members = {
        "__module__": RemoteError.__module__,
        "__qualname__": f"RemoteError({_type_name(original)})",
        "__doc__": f"A {original.__name__} that was raised on another worker.",
        "__str__": RemoteError.__str__,
        "__reduce_ex__": _reduce,
    }
    if issubclass(RemoteError, original):  # RuntimeError, Exception
        bases: tuple[type, ...] = (RemoteError,)
    else:
        bases = (original, RemoteError)
    made: type[RemoteError] = type(original.__name__, bases, members)
    return made


def _reduce(exc: RemoteError, _protocol: object) -> tuple[Any, ...]:
    """Its class has no name to be found by, so what travels on is what came."""
    origin = exc.__dict__.get("_origin")
    if origin is None:
        raise pickle.PicklingError(f"this {type(exc).__qualname__} was not raised by a remote call")
    return unpack_exception, (pickle.dumps(tuple(origin), protocol=5),)
