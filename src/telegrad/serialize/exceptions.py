"""Exceptions on their way from the worker that raised them to the caller.

A message has the exception itself, if it can be pickled, and its type, text and traceback as text. The caller makes
the exception again, of a class that is both the original type and a :class:`~telegrad.errors.RemoteError`: programs
that catch ``RuntimeError`` and programs that catch ``KeyError`` both work. A class that the caller cannot import
(local, of a notebook) travels by value, as functions do.
"""

import copy
import copyreg
import functools
import io
import os
import pickle
import re
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

import telegrad
from telegrad.errors import TEXT, RemoteError, TelegradError, is_drop_in
from telegrad.serialize.by_value import ByValuePickler
from telegrad.types import WorkerInfo

__all__ = [
    "RemoteTraceback",
    "afresh",
    "describe_exception",
    "forget_frames",
    "has_let_go_of_frames",
    "is_interrupt",
    "let_go_of_frames",
    "pack_exception",
    "show_exception",
    "text_of",
    "traceback_of",
    "unpack_exception",
    "without_own_frames",
]

E = TypeVar("E", bound=BaseException)


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


def show_exception(exc: BaseException) -> str:
    """``repr(exc)``, also where that fails."""
    try:
        return repr(exc)
    except BaseException as e:  # user code; its SystemExit must end nobody's thread
        return f"<{_type_name(type(exc))}, whose repr() raised {type(e).__name__}>"


def text_of(exc: BaseException) -> str:
    """``str(exc)``, also where that fails."""
    try:
        return str(exc)
    except BaseException:  # as in show_exception
        return show_exception(exc)


def is_interrupt(exc: BaseException) -> bool:
    """Tell whether a signal handler may have raised the exception: then the calling thread, the main one, must raise
    it. Elsewhere user code has raised it, such as SystemExit while a value was unpickled."""
    return not isinstance(exc, Exception) and threading.current_thread() is threading.main_thread()


def let_go_of_frames(exc: BaseException, worker: WorkerInfo) -> None:
    """Keeps an exception's traceback as text only. For one that is to be raised again, maybe much later: its frames
    would keep all variables of the failed call alive."""
    text = exc.__dict__[_TRACEBACK] = traceback_of(exc)
    if exc.__cause__ is None:
        _set_cause(exc, RemoteTraceback(worker.name, worker.id, text))
    forget_frames(exc)


def _set_cause(exc: BaseException, cause: BaseException | None) -> None:
    """Also of an exception whose class lets nobody set attributes, as a frozen dataclass."""
    BaseException.__setattr__(exc, "__cause__", cause)


def has_let_go_of_frames(exc: BaseException) -> bool:
    """Whether an exception is raised again, after `let_go_of_frames`."""
    return _TRACEBACK in exc.__dict__


def forget_frames(exc: BaseException) -> None:
    """Takes the tracebacks of an exception and of those that led to it."""
    todo: list[BaseException | None] = [exc]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            BaseException.with_traceback(one, None)
            todo += (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))


def afresh(exc: BaseException) -> BaseException:
    """A copy of an exception that is kept and may be raised often. Raising it itself would hang the frames of whoever
    asks, with all their variables, on what keeps it."""
    try:
        again = copy.copy(exc)
        if type(again) is not type(exc):
            raise TypeError(f"a copy of {_type_name(type(exc))} is something else")
    except Exception:  # its class cannot be made from its args
        return exc.with_traceback(None)
    _set_cause(again, again.__cause__ or exc.__cause__)  # which also hides the context
    return again


if TYPE_CHECKING:  # cloudpickle has no types
    from pickle import Pickler as _ByValuePickler
else:
    from cloudpickle import Pickler as _ByValuePickler  # by value is its way with __main__

_TRACEBACK = "_telegrad_traceback"
_ORIGIN = "_telegrad_origin"


def traceback_of(exc: BaseException) -> str:
    """The traceback as Python prints it, without Telegrad's own frames before the user's first one."""
    kept = exc.__dict__.get(_TRACEBACK)
    if isinstance(kept, str):
        return kept
    try:
        trace = traceback.TracebackException(type(exc), exc, exc.__traceback__)
        _drop_own_frames(exc, trace)
        return "".join(trace.format())
    except BaseException:  # user code: a broken __str__ or __cause__
        return "".join(traceback.format_tb(exc.__traceback__)) + show_exception(exc) + "\n"


_OURS = os.path.join(os.path.dirname(telegrad.__file__), "")
_EXAMPLES = os.path.join(_OURS, "examples", "")
_FUTURES = os.path.join(os.path.dirname(torch.futures.__file__), "")


def _is_own(file: str) -> bool:
    return file.startswith((_OURS, _FUTURES)) and not file.startswith(_EXAMPLES)


def _drop_own_frames(exc: BaseException, trace: traceback.TracebackException) -> None:
    """Leaves the user's frames in each stack. Those of Telegrad stay where there are no others, and at the end of a
    stack whose error is none of Telegrad's: there is the defect."""
    todo: list[tuple[BaseException | None, traceback.TracebackException | None]] = [(exc, trace)]
    seen: set[int] = set()
    while todo:
        error, one = todo.pop()
        if error is None or one is None or id(one) in seen:
            continue
        seen.add(id(one))
        users = [index for index, frame in enumerate(one.stack) if not _is_own(frame.filename)]
        if users:
            end = len(one.stack) if isinstance(error, TelegradError) else users[-1]
            one.stack[:] = [f for index, f in enumerate(one.stack) if index > end or not _is_own(f.filename)]
        todo += ((error.__cause__, one.__cause__), (error.__context__, one.__context__))
        todo += zip(getattr(error, "exceptions", ()), one.exceptions or (), strict=False)


def without_own_frames(exc: E) -> E:
    """The exception, to be raised again where the program has called Telegrad: its traceback goes no deeper, unless
    code of the program's own was called there."""
    trace = exc.__traceback__
    while trace is not None and _is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return exc if trace is not None else exc.with_traceback(None)


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
        packed = _Packed(name, worker_id, _type_name(type(exc)), shown, text_of(exc), trace, *_pickled(exc))
    else:
        kind = _type_name(type(exc))
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
    exc.__dict__.pop(_TRACEBACK, None)
    facts = exc.__dict__  # written to directly: the class may let nobody set attributes
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
    _set_cause(exc, RemoteTraceback(packed.worker, packed.worker_id, packed.traceback))
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
    except AttributeError:  # its class lets nobody set attributes
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
        "__qualname__": f"RemoteError({_type_name(original)})",
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
