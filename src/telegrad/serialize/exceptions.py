"""Serialization of exceptions that a remote function raised.

A message has the pickled exception, if it can be pickled, and its type, text and traceback as text. The caller rebuilds
the exception with a class that is both the original type and a :class:`~telegrad.errors.RemoteError`. So both
``except KeyError`` and ``except RuntimeError`` catch a remote ``KeyError``. A class that the caller cannot import (a
local class, or one of a notebook) is sent by value, like functions.

Without pickles (option ``allow_pickle=False``), arguments and attributes travel as plain data (`plain_exceptions`). The
caller rebuilds exceptions of Python and of Telegrad from them, and gets a plain RemoteError for others.
"""

import copyreg
import functools
import io
import pickle
import re
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from telegrad import errors
from telegrad.errors import TEXT, RemoteError, SerializationError, is_drop_in
from telegrad.serialize.exception_changes import apply_changes, copy_facts, mark_arrival, notes_of, pack_changes
from telegrad.serialize.module_imports import canonical
from telegrad.serialize.pickle_by_value import ByValuePickler
from telegrad.serialize.plain_exceptions import decode_facts, known_types, pack_plain
from telegrad.serialize.plain_fields import decode_fields, encode_fields
from telegrad.serialize.tensor_layout import Body
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
from telegrad.serialize.unpickling import OPEN, PickleGate
from telegrad.types import WorkerInfo

__all__ = ["describe_exception", "pack_exception", "unpack_exception"]


class _Packed(NamedTuple):
    """The fields of the message."""

    worker: str
    worker_id: int
    type_name: str  # with its module
    shown: str  # repr()
    message: str  # str()
    traceback: str
    pickled: bytes | None  # (maker, args) or (maker, args, state), as returned by __reduce_ex__
    why_not: str  # why the exception, or part of its state, could not be pickled
    by_value: bytes | None = None  # `pickled` with the class by value, for callers with another script as __main__
    plain: bytes | None = None  # arguments and attributes, encoded by the codec
    omitted: str = ""  # names of the attributes that were not sent; empty if none or all
    changes: bytes | None = None  # what the workers that forwarded it have added


# Escape sequences of repr(), except for quotes.
_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt\\])")


def _unescaped(text: str) -> str:
    """Undo the escape sequences of repr() and nothing else."""
    return _ESCAPE.sub(lambda m: m[0].encode("ascii").decode("unicode_escape"), text)


if TYPE_CHECKING:  # cloudpickle has no types
    from pickle import Pickler as _ByValuePickler
else:
    from cloudpickle import Pickler as _ByValuePickler  # pickles classes of __main__ by value

_ORIGIN = "_telegrad_origin"


def describe_exception(exc: BaseException, worker: WorkerInfo) -> str:
    """Return torch's text of an exception.

    Torch prints it on the worker that raised the exception, and returns it as ``str()`` on the caller.
    """
    return _text(worker.name, worker.id, show_exception(exc), traceback_of(exc))


def _text(worker: str, worker_id: int, shown: str, trace: str) -> str:
    return f"On {WorkerInfo(worker, worker_id)}:\n{_unescaped(shown)}\n{trace}"


def pack_exception(exc: BaseException, worker_info: WorkerInfo, gate: PickleGate = OPEN) -> bytes:
    """Serialize an exception. Never raises.

    Args:
        exc: The exception that user code raised, with its traceback still attached.
        worker_info: The worker that raised it.
        gate: The worker's permission for pickles; without it the exception is not pickled.
    """
    name, worker_id = worker_info.name, worker_info.id
    shown, trace = show_exception(exc), traceback_of(exc)
    origin = exc.__dict__.get(_ORIGIN)
    if isinstance(exc, RemoteError) and isinstance(origin, _Packed):  # from a third worker: forward the original
        packed = _with_changes(origin, exc, gate)._replace(
            worker=name, worker_id=worker_id, shown=shown, traceback=trace
        )
        if not gate.is_open and packed.pickled is not None:
            packed = packed._replace(pickled=None, by_value=None, why_not=_NOT_PICKLED)
    elif isinstance(exc, Exception):
        parts = _pickled(exc) if gate.is_open else (None, _NOT_PICKLED, None, *pack_plain(exc))
        packed = _Packed(name, worker_id, type_name(type(exc)), shown, text_of(exc), trace, *parts)
    else:
        kind = type_name(type(exc))
        message = f"the call raised {shown} on worker {name}, which ends neither that worker nor its caller"
        packed = _Packed(name, worker_id, kind, shown, message, trace, None, kind + _NOT_RAISED_AGAIN)
    return encode_fields(packed)


def _with_changes(origin: _Packed, exc: RemoteError, gate: PickleGate) -> _Packed:
    return origin._replace(changes=pack_changes(exc, _dumped if gate.is_open else None) or origin.changes)


_NOT_RAISED_AGAIN = " cannot be raised on another worker"
_NOT_PICKLED = "are not plain data, and the workers exchange no pickles (option allow_pickle=False)"


def _pickled(exc: Exception) -> tuple[bytes | None, str, bytes | None, None, str]:
    """Return the fields of `_Packed` from `pickled` on."""
    try:
        reduce = copyreg.dispatch_table.get(type(exc))
        parts: object = exc.__reduce_ex__(5) if reduce is None else reduce(exc)
        if not isinstance(parts, tuple) or len(parts) not in (2, 3):
            parts = _itself, (exc,)
        try:
            return _dumped(parts), "", _by_value(type(exc), parts), None, ""
        except BaseException as e:  # user code, as in show_exception
            why = _pickle_failed(e)
        omitted: list[str] = []
        kept = (*parts[:2], *_kept(parts[2:], omitted))
        return _dumped(kept, omitted), why, _by_value(type(exc), kept), None, ", ".join(omitted)
    except BaseException as e:  # user code
        return None, _pickle_failed(e), None, None, ""


def _dumped(parts: object, omitted: list[str] | None = None) -> bytes:
    file = io.BytesIO()
    _ExceptionPickler(file, omitted).dump(parts)
    return file.getvalue()


def _kept(state: tuple[object, ...], omitted: list[str]) -> tuple[object, ...]:
    """Return a state without the attributes that cannot be pickled.

    Args:
        state: What follows the arguments in a result of `__reduce_ex__`: one item, or none.
        omitted: Gets their names.
    """
    if not state or not isinstance(state[0], dict):
        return ()
    kept = {}
    for name, value in state[0].items():
        try:
            _dumped((name, value))
        except BaseException:  # user code
            omitted.append(str(name))
        else:
            kept[name] = value
    return (kept,)


class _ExceptionPickler(ByValuePickler):
    """Pickler of exceptions in the arguments and attributes of an exception.

    Args:
        file: Gets the pickle.
        omitted: Gets the names of attributes that cannot be pickled; None to fail because of them.
    """

    def __init__(self, file: io.BytesIO, omitted: list[str] | None) -> None:
        super().__init__(file)
        self._omitted = omitted

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, BaseException) or type(obj) in copyreg.dispatch_table:
            return super().reducer_override(obj)
        parts: object = obj.__reduce_ex__(5)
        if not isinstance(parts, tuple) or len(parts) not in (2, 3) or parts[0] is not type(obj):
            return parts
        state = parts[2:] if self._omitted is None else _kept(parts[2:], self._omitted)
        return make_contained, parts[:2], *state


def make_contained(kind: type[BaseException], args: tuple[object, ...]) -> BaseException:
    """Create an exception that another exception contains.

    Args:
        kind: Its class. The constructor is not called if it accepts other arguments.
        args: Its ``args``.
    """
    try:
        return kind(*args)
    except Exception:  # as in _without_constructor
        exc = kind.__new__(kind, *args)
        exc.args = args
        return exc


def _by_value(kind: type, parts: tuple[object, ...]) -> bytes | None:
    if canonical(kind.__module__) != "__main__":
        return None
    try:
        file = _LimitedFile()
        _ClassPickler(file, protocol=5).dump(parts)
        return file.getvalue()
    except BaseException:  # user code, or too large: the class is sent by name only
        return None


class _ClassPickler(_ByValuePickler):
    """Pickler of a class of `__main__` with its methods, but without large data."""

    def reducer_override(self, obj: object) -> Any:
        nbytes = getattr(obj, "nbytes", 0)  # of tensors and arrays
        if isinstance(nbytes, int) and nbytes > _LARGEST_CLASS:
            raise ValueError("too large")
        is_of_script = getattr(obj, "__module__", None) == "__mp_main__"  # cloudpickle knows only __main__
        if is_of_script and isinstance(obj, type):
            return cloudpickle.cloudpickle._dynamic_class_reduce(obj)
        if is_of_script and isinstance(obj, FunctionType):
            return self._dynamic_function_reduce(obj)  # type: ignore[attr-defined]
        return super().reducer_override(obj)


class _LimitedFile(io.BytesIO):
    """Buffer that raises if it exceeds the size limit of a class."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _LARGEST_CLASS:
            raise ValueError("too large")
        return super().write(data)


_LARGEST_CLASS = 16 << 10  # bytes


def _pickle_failed(e: BaseException) -> str:
    if isinstance(e, errors.RRefNotPicklable):
        why = "an exception cannot have a remote reference: return it, or send its value"
    else:
        why = f"{type(e).__name__}: {text_of(e)}"
    return f"could not be pickled by the callee ({why})"


def _itself(exc: Exception) -> Exception:
    return exc


def unpack_exception(data: Body, gate: PickleGate = OPEN) -> BaseException:
    """Rebuild an exception, with the remote traceback as its ``__cause__``.

    Never raises for the output of :func:`pack_exception`, except a KeyboardInterrupt of this process.

    Args:
        data: The output of :func:`pack_exception`.
        gate: The worker's permission to load pickles.

    Returns:
        An exception that is a :class:`~telegrad.errors.RemoteError`, and also of the original type if that could be
        rebuilt. ``raise`` it as is, or pass it to ``Future.set_exception``.
    """
    try:
        packed = _Packed(*decode_fields(data))  # type: ignore[arg-type]  # a malicious sender may send other types
    except TypeError as error:
        raise SerializationError("an exception came with too few or too many fields") from error
    if not all(isinstance(each, str) for each in (packed.worker, *packed[2:6], packed.why_not, packed.omitted)):
        raise SerializationError("an exception came with fields of other types")
    exc, note, text = _made_again(packed, gate)
    exc.__dict__.pop(TRACEBACK, None)
    facts = exc.__dict__  # written directly, because the class may not allow setting attributes
    cause = RemoteTraceback(packed.worker, packed.worker_id, packed.traceback, packed.type_name)
    for name in ("worker", "worker_id", "original_type", "remote_traceback"):
        if not _has_attribute(exc, name):
            facts[name] = getattr(cause, name)
    facts[_ORIGIN] = packed
    if is_drop_in():
        facts[TEXT] = text
    elif note:
        facts["__notes__"] = [*notes_of(exc), note]
    mark_arrival(exc)
    if packed.changes is not None and not apply_changes(exc, packed.changes, _loader(gate)):
        facts[_ORIGIN] = packed._replace(changes=None)
    set_cause(exc, cause)
    return exc


def _has_attribute(exc: RemoteError, name: str) -> bool:
    """Return whether the original, or its class, has an attribute of its own."""
    return name in exc.__dict__ or any(name in vars(k) for k in type(exc).__mro__ if not issubclass(RemoteError, k))


def _made_again(packed: _Packed, gate: PickleGate) -> tuple[RemoteError, str, str]:
    """Return the rebuilt exception, a note for the user, and torch's text for it."""
    text = _text(packed.worker, packed.worker_id, packed.shown, packed.traceback)
    names = f" ({packed.omitted})" if packed.omitted else ""
    without = f"Its attributes{names} were not sent: they {packed.why_not}." if packed.why_not else ""
    if packed.plain is not None and packed.type_name in known_types() and not packed.omitted:
        without = ""
    try:
        return _of_parts(packed, gate, _remote_class), without, text
    except BaseException as e:  # user code: constructors and __setstate__
        if is_interrupt(e):
            raise
        why = packed.why_not or f"{type(e).__name__}: {text_of(e)}"
    try:
        exc = _of_parts(packed, gate, _without_constructor)
    except BaseException as e:  # user code
        if is_interrupt(e):
            raise
        torchs = (
            f"Failed to create original exception type. Error msg was {why}"
            f" Original exception on remote side was {text}"
        )
        if packed.pickled is None and why.endswith(_NOT_RAISED_AGAIN):
            return RemoteError(packed.message), "", torchs
        if packed.pickled is None and packed.why_not == _NOT_PICKLED:
            why = f"its arguments and attributes {why}"
        elif packed.pickled is None:
            why = f"that {why}"
        note = f"This is a RemoteError instead of {packed.type_name}: {why}."
        return RemoteError(f"{packed.type_name}: {packed.message}"), note, torchs
    torchs = f"{text}Made without its constructor, which takes other arguments than its args ({why})."
    return exc, without, f"{torchs} Original exception on remote side was {packed.type_name}.\n"


def _parts(packed: _Packed, gate: PickleGate) -> tuple[Any, ...]:
    kind = known_types().get(packed.type_name)
    if packed.plain is not None and kind is not None:
        args, facts = decode_facts(packed.plain, _loader(gate))
        return (errors.rebuild, (kind, args, facts)) if issubclass(kind, errors.TelegradError) else (kind, args, facts)
    if packed.pickled is None:
        raise TypeError(packed.why_not)
    try:
        parts: tuple[Any, ...] = gate.loads(packed.pickled, "an exception")
    except AttributeError:
        if packed.by_value is None:
            raise
        parts = gate.loads(packed.by_value, "an exception")
    return parts


def _loader(gate: PickleGate) -> Callable[[bytes], object]:
    return lambda data: gate.loads(data, "an exception")


def _of_parts(packed: _Packed, gate: PickleGate, maker_of: Callable[..., Callable[..., Any]]) -> RemoteError:
    """Rebuild the exception from its parts.

    Args:
        packed: The message.
        gate: Permission to load pickles.
        maker_of: Returns what to call instead of an exception class.
    """
    maker, args, *state = _parts(packed, gate)
    if isinstance(maker, type) and issubclass(maker, Exception):
        maker = maker_of(maker)
    exc = maker(*args)
    if isinstance(exc, Exception) and not isinstance(exc, RemoteError):  # created by a function instead of its class
        exc.__class__ = _remote_class(type(exc))  # type: ignore[arg-type]  # types are hashable
    if not isinstance(exc, RemoteError):  # __reduce__ created another object
        raise TypeError(f"what {packed.type_name} pickles as{_NOT_RAISED_AGAIN}")
    if state and state[0] is not None:
        _restore(exc, state[0])
    return exc


def _restore(exc: RemoteError, state: Any) -> None:
    try:
        exc.__setstate__(state)
    except AttributeError:  # the class does not allow setting attributes
        if not isinstance(state, dict):
            raise
        exc.__dict__.update(state)


def _without_constructor(original: type[Exception]) -> Callable[..., RemoteError]:
    """Return a function that creates an exception without calling its constructor.

    Needed if the constructor does not accept the exception's ``args``, for example ``__init__(self, a, b)`` that passes
    one text to ``super().__init__``. The attributes are restored with ``__dict__``.
    """
    made = _remote_class(original)  # type: ignore[arg-type]  # types are hashable

    def make(*args: object) -> RemoteError:
        exc = made.__new__(made, *args)
        exc.args = args
        return exc

    return make


@functools.lru_cache(maxsize=256)
def _remote_class(original: type[Exception]) -> type[RemoteError]:
    """Return the class that is both ``original`` and a RemoteError.

    The original is the first base, so its constructor, attributes and methods apply. Only ``__str__`` and pickling are
    those of RemoteError.
    """
    members = {
        "__module__": RemoteError.__module__,
        "__qualname__": f"RemoteError({type_name(original)})",
        "__doc__": f"A {original.__name__} that was raised on another worker.",
        "__str__": lambda exc: exc.__dict__.get(TEXT) or _message_of(original, exc),
        "__copy__": _copy,
        "__reduce_ex__": _reduce,
    }
    if issubclass(RemoteError, original):  # RuntimeError, Exception
        bases: tuple[type, ...] = (RemoteError,)
    else:
        bases = (original, RemoteError)
    made: type[RemoteError] = type(original.__name__, bases, members)
    return made


def _message_of(original: type[Exception], exc: RemoteError) -> str:
    """Return ``str()`` of the original, or its remote ``repr`` if that fails."""
    try:
        return original.__str__(exc)
    except Exception:
        return str(exc.__dict__[_ORIGIN].shown)


def _reduce(exc: RemoteError, _protocol: object) -> tuple[object, ...]:
    """Pickle an exception as its message, because its class cannot be found by name."""
    return unpack_exception, (encode_fields(_with_changes(_origin_of(exc), exc, OPEN)),)


def _copy(exc: RemoteError) -> BaseException:
    """Copy an exception with all that the program has added to it."""
    again = unpack_exception(encode_fields(_origin_of(exc)._replace(changes=None)))
    copy_facts(exc, again)
    set_cause(again, exc.__cause__)
    return again


def _origin_of(exc: RemoteError) -> _Packed:
    origin = exc.__dict__.get(_ORIGIN)
    if not isinstance(origin, _Packed):
        raise pickle.PicklingError(f"this {type(exc).__qualname__} was not raised by a remote call")
    return origin
