"""Exceptions on their way from the worker that raised them to the caller.

A message has the exception itself, if it can be pickled, and its type, text and traceback as text. The caller makes
the exception again, of a class that is both the original type and a :class:`~telegrad.errors.RemoteError`: programs
that catch ``RuntimeError`` and programs that catch ``KeyError`` both work. A class that the caller cannot import
(local, of a notebook) travels by value, as functions do.
"""

import copyreg
import functools
import io
import pickle
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad.errors import TEXT, RemoteError, is_drop_in
from telegrad.serialize.by_value import ByValuePickler
from telegrad.serialize.tracebacks import (
    TRACEBACK,
    RemoteTraceback,
    is_interrupt,
    set_cause,
    show_exception,
    text_of,
    traceback_of,
    type_name,
)
from telegrad.types import WorkerInfo

__all__ = ["describe_exception", "pack_exception", "unpack_exception"]


class _Packed(NamedTuple):
    """What is sent."""

    worker: str
    worker_id: int
    type_name: str  # with its module
    shown: str  # repr()
    message: str  # str()
    traceback: str
    pickled: bytes | None  # (maker, args) or (maker, args, state), as __reduce_ex__ gives them
    why_not: str  # why it, or its state, could not be pickled
    by_value: bytes | None = None  # the same with its class, for callers whose __main__ is another script


# An escape as repr() writes them, but for quotes.
_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt\\])")


def _unescaped(text: str) -> str:
    """Undoes repr()'s escapes and nothing else, so line breaks are line breaks and other letters stay whole."""
    return _ESCAPE.sub(lambda m: m[0].encode("ascii").decode("unicode_escape"), text)


if TYPE_CHECKING:  # cloudpickle has no types
    from pickle import Pickler as _ByValuePickler
else:
    from cloudpickle import Pickler as _ByValuePickler  # by value is its way with __main__

_ORIGIN = "_telegrad_origin"


def describe_exception(exc: BaseException, worker: WorkerInfo) -> str:
    """The text that torch prints on the worker that raised it, and gives to the caller as ``str()``."""
    return _text(worker.name, worker.id, show_exception(exc), traceback_of(exc))


def _text(worker: str, worker_id: int, shown: str, trace: str) -> str:
    return f"On {WorkerInfo(worker, worker_id)}:\n{_unescaped(shown)}\n{trace}"


def pack_exception(exc: BaseException, worker_info: WorkerInfo) -> bytes:
    """Makes bytes of an exception. Never raises.

    Args:
        exc: what user code raised. Called while its traceback is still attached.
        worker_info: the worker on which it was raised.
    """
    name, worker_id = worker_info.name, worker_info.id
    shown, trace = show_exception(exc), traceback_of(exc)
    origin = exc.__dict__.get(_ORIGIN)
    if isinstance(exc, RemoteError) and isinstance(origin, _Packed):  # a third worker's goes on as what it was there
        packed = origin._replace(worker=name, worker_id=worker_id, shown=shown, traceback=trace)
    elif isinstance(exc, Exception):
        packed = _Packed(name, worker_id, type_name(type(exc)), shown, text_of(exc), trace, *_pickled(exc))
    else:
        kind = type_name(type(exc))
        message = f"the call raised {shown} on worker {name}, which ends neither that worker nor its caller"
        packed = _Packed(name, worker_id, kind, shown, message, trace, None, kind + _NOT_RAISED_AGAIN)
    return pickle.dumps(tuple(packed), protocol=5)


_NOT_RAISED_AGAIN = " cannot be raised at a distance"


def _pickled(exc: Exception) -> tuple[bytes | None, str, bytes | None]:
    """The last three fields."""
    try:
        reduce = copyreg.dispatch_table.get(type(exc))
        parts: Any = exc.__reduce_ex__(5) if reduce is None else reduce(exc)
        if not isinstance(parts, tuple) or len(parts) not in (2, 3):
            parts = _itself, (exc,)
        try:
            return _dumped(parts), "", _by_value(type(exc), parts)
        except BaseException as e:  # user code, as in show_exception
            if len(parts) == 2:
                raise
            return _dumped(parts[:2]), _could_not(e), _by_value(type(exc), parts[:2])
    except BaseException as e:  # the same
        return None, _could_not(e), None


def _dumped(parts: tuple[Any, ...]) -> bytes:
    file = io.BytesIO()
    ByValuePickler(file).dump(parts)
    return file.getvalue()


def _by_value(kind: type, parts: tuple[Any, ...]) -> bytes | None:
    if kind.__module__ != "__main__":
        return None
    try:
        file = _LimitedFile()
        _ClassPickler(file, protocol=5).dump(parts)
        return file.getvalue()
    except BaseException:  # user code, or much of it: then it travels by name alone
        return None


class _ClassPickler(_ByValuePickler):
    """Pickles a class of `__main__` with its methods, but not the data that these refer to."""

    def reducer_override(self, obj: Any) -> Any:
        nbytes = getattr(obj, "nbytes", 0)  # of tensors and arrays
        if isinstance(nbytes, int) and nbytes > _LARGEST_CLASS:
            raise ValueError("too large")
        return super().reducer_override(obj)


class _LimitedFile(io.BytesIO):
    """Takes no more than a class."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _LARGEST_CLASS:
            raise ValueError("too large")
        return super().write(data)


_LARGEST_CLASS = 16 << 10  # bytes


def _could_not(e: BaseException) -> str:
    return f"could not be pickled there ({type(e).__name__}: {text_of(e)})"


def _itself(exc: Exception) -> Exception:
    return exc


def unpack_exception(data: bytes) -> BaseException:
    """Makes the exception again, with the remote traceback as its ``__cause__``. Never raises on what
    :func:`pack_exception` made, except for a KeyboardInterrupt of this process.

    Returns:
        An exception that is a :class:`~telegrad.errors.RemoteError`, and of the original type as well if that could
        be made again. ``raise`` it as it is, or give it to ``Future.set_exception``.
    """
    packed = _Packed(*pickle.loads(data))
    exc, note, text = _made_again(packed)
    exc.__dict__.pop(TRACEBACK, None)
    facts = exc.__dict__  # written to directly: the class may refuse to set attributes
    facts |= {
        "worker": packed.worker,
        "worker_id": packed.worker_id,
        "original_type": packed.type_name,
        "remote_traceback": packed.traceback,
        _ORIGIN: packed,
    }
    if is_drop_in():
        facts[TEXT] = text
    elif note:
        facts["__notes__"] = [*facts.get("__notes__", ()), note]
    set_cause(exc, RemoteTraceback(packed.worker, packed.worker_id, packed.traceback))
    return exc


def _made_again(packed: _Packed) -> tuple[RemoteError, str, str]:
    """The exception, a note for its reader, and torch's text for it."""
    text = _text(packed.worker, packed.worker_id, packed.shown, packed.traceback)
    without = f"Its attributes have stayed behind: they {packed.why_not}." if packed.why_not else ""
    try:
        return _of_parts(packed, _remote_class), without, text
    except BaseException as e:  # user code: constructors and __setstate__
        if is_interrupt(e):
            raise
        why = packed.why_not or f"{type(e).__name__}: {text_of(e)}"
    try:
        exc = _of_parts(packed, _without_constructor)
    except BaseException as e:  # the same
        if is_interrupt(e):
            raise
        torchs = (
            f"Failed to create original exception type. Error msg was {why}"
            f" Original exception on remote side was {text}"
        )
        if packed.pickled is None and why.endswith(_NOT_RAISED_AGAIN):
            return RemoteError(packed.message), "", torchs
        if packed.pickled is None:
            why = f"that {why}"
        note = f"This is a RemoteError instead of {packed.type_name}: {why}."
        return RemoteError(f"{packed.type_name}: {packed.message}"), note, torchs
    torchs = f"{text}Made without its constructor, which takes other arguments than its args ({why})."
    return exc, without, f"{torchs} Original exception on remote side was {packed.type_name}.\n"


def _parts(packed: _Packed) -> tuple[Any, ...]:
    if packed.pickled is None:
        raise TypeError(packed.why_not)
    try:
        parts: tuple[Any, ...] = pickle.loads(packed.pickled)
    except AttributeError:
        if packed.by_value is None:
            raise
        parts = pickle.loads(packed.by_value)
    return parts


def _of_parts(packed: _Packed, maker_of: Callable[..., Callable[..., Any]]) -> RemoteError:
    """The exception, made of the parts that were sent: classes of exceptions are called as `maker_of` gives them."""
    maker, args, *state = _parts(packed)
    if isinstance(maker, type) and issubclass(maker, Exception):
        maker = maker_of(maker)
    exc = maker(*args)
    if isinstance(exc, Exception) and not isinstance(exc, RemoteError):  # a function has made it, not its class
        exc.__class__ = _remote_class(type(exc))  # type: ignore[arg-type]  # types are hashable
    if not isinstance(exc, RemoteError):  # whatever a __reduce__ made instead
        raise TypeError(f"what {packed.type_name} pickles as{_NOT_RAISED_AGAIN}")
    if state and state[0] is not None:
        _restore(exc, state[0])
    return exc


def _restore(exc: RemoteError, state: Any) -> None:
    try:
        exc.__setstate__(state)
    except AttributeError:  # its class refuses to set attributes
        if not isinstance(state, dict):
            raise
        exc.__dict__.update(state)


def _without_constructor(original: type[Exception]) -> Callable[..., RemoteError]:
    """Makes an exception of args that its constructor does not take: ``__init__(self, a, b)`` that gives one text to
    ``super().__init__``, say. Its attributes come with its ``__dict__``."""
    made = _remote_class(original)  # type: ignore[arg-type]  # types are hashable

    def make(*args: Any) -> RemoteError:
        exc = made.__new__(made, *args)
        exc.args = args
        return exc

    return make


@functools.lru_cache(maxsize=256)
def _remote_class(original: type[Exception]) -> type[RemoteError]:
    """The class that is both ``original`` and a RemoteError.

    The original comes first among its bases, so that its constructor, attributes and methods are
    in force; only how it is shown and pickled is the RemoteError's.
    """
    members = {
        "__module__": RemoteError.__module__,
        "__qualname__": f"RemoteError({type_name(original)})",
        "__doc__": f"A {original.__name__} that was raised on another worker.",
        "__str__": lambda exc: exc.__dict__.get(TEXT) or _message_of(original, exc),
        "__reduce_ex__": _reduce,
    }
    if issubclass(RemoteError, original):  # RuntimeError, Exception
        bases: tuple[type, ...] = (RemoteError,)
    else:
        bases = (original, RemoteError)
    made: type[RemoteError] = type(original.__name__, bases, members)
    return made


def _message_of(original: type[Exception], exc: RemoteError) -> str:
    """``str()`` as the original has it; where that fails, as it was shown there."""
    try:
        return original.__str__(exc)
    except Exception:
        return str(exc.__dict__[_ORIGIN].shown)


def _reduce(exc: RemoteError, _protocol: object) -> tuple[Any, ...]:
    """Its class has no name to be found by, so what travels on is what came."""
    origin = exc.__dict__.get(_ORIGIN)
    if origin is None:
        raise pickle.PicklingError(f"this {type(exc).__qualname__} was not raised by a remote call")
    return unpack_exception, (pickle.dumps(tuple(origin), protocol=5),)
