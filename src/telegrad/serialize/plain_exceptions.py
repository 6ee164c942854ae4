"""Exceptions as plain data, for workers with the option ``allow_pickle=False``.

Each argument and each attribute is encoded on its own, so that one that cannot be sent does not affect the others. The
receiver knows the types of Python and of Telegrad by name, also those of contained exceptions.
"""

import builtins
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from telegrad import errors
from telegrad.errors import TEXT, RemoteError, SerializationError
from telegrad.serialize.pickling import RECORD_CODE
from telegrad.serialize.plain_data import PlainData
from telegrad.serialize.tensor_layout import make_codec
from telegrad.serialize.tracebacks import TRACEBACK, text_of, type_name

__all__ = ["decode_facts", "encode_facts", "known_types", "pack_plain"]

_MAX_DEPTH = 64  # of nested containers
_LOCAL_FACTS = (TEXT, TRACEBACK)
_codec = make_codec(_MAX_DEPTH)


class _Text(str):
    """Text that may have lone surrogates, as in names of files."""


@functools.cache
def known_types() -> dict[str, type[Exception]]:
    """Return the exceptions that can be rebuilt without pickle, by name."""
    found = [*vars(builtins).values(), *(getattr(errors, name) for name in errors.__all__)]
    return {
        type_name(each): each
        for each in found
        if isinstance(each, type) and issubclass(each, Exception) and not issubclass(each, RemoteError)
    }


def pack_plain(exc: Exception) -> tuple[bytes | None, str]:
    """Encode the arguments and attributes of an exception.

    Returns:
        The data, or None if the receiver does not know the type or user code fails; and the names of the attributes
        that cannot be sent. An argument that cannot be sent becomes its ``repr``.
    """
    try:
        if known_types().get(type_name(type(exc))) is not type(exc):
            return None, ""
        args, attributes = _facts_of(exc)
        return encode_facts(args, attributes)
    except BaseException:  # user code; its SystemExit must not end this thread
        return None, ""


def encode_facts(
    args: Iterable[object], attributes: Mapping[str, object], dump: Callable[[object], bytes] | None = None
) -> tuple[bytes | None, str]:
    """Encode arguments and attributes, as `pack_plain`.

    Args:
        args: The arguments.
        attributes: The attributes.
        dump: Pickles one that is not plain data; None if pickles are not sent.
    """
    packed_args = [_part(each, dump) or _packed(_shown(each)) for each in args]
    packed = {name: _part(each, dump) for name, each in attributes.items()}
    omitted = [name for name, data in packed.items() if data is None]
    coded = _codec.encode((packed_args, {name: data for name, data in packed.items() if data is not None}))
    return (None if coded is None else coded[0]), ", ".join(omitted)


def decode_facts(data: bytes, load: Callable[[bytes], object]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments and attributes of an exception.

    Args:
        data: The output of `encode_facts` or `pack_plain`.
        load: Loads one that is a pickle.

    Raises:
        Exception: The data is malformed, or whatever `load` raises.
    """
    coded: Any = _codec.decode(data, [])
    args, attributes = coded

    def decoded(part: Any) -> object:
        return _codec.decode(part, []) if type(part) is bytes else load(*part)

    return tuple(map(decoded, args)), {str(name): decoded(each) for name, each in attributes.items()}


def _part(value: object, dump: Callable[[object], bytes] | None) -> bytes | tuple[bytes] | None:
    data = _packed(value)
    if data is not None or dump is None:
        return data
    try:
        return (dump(value),)
    except Exception:  # user code
        return None


def _facts_of(exc: Exception) -> tuple[tuple[object, ...], dict[str, object]]:
    args, attributes = exc.args, exc.__dict__
    if isinstance(exc, ExceptionGroup):
        args = exc.message, [_known(each) for each in exc.exceptions]
    elif not isinstance(exc, errors.TelegradError):  # the constructor may take more than the args
        reduced: Any = exc.__reduce_ex__(5)
        args, attributes = reduced[1], dict(*reduced[2:])
    return args, {name: value for name, value in attributes.items() if name not in _LOCAL_FACTS}


def _known(exc: Exception) -> Exception:
    """Return a part of a group, or a RemoteError if the part cannot be sent."""
    if _packed(exc) is not None:
        return exc
    return RemoteError(f"{type_name(type(exc))}: {text_of(exc)}")


def _packed(value: object) -> bytes | None:
    """Encode one value; return None if it is not plain data, or has large tensors."""
    if type(value) is str and not value.isascii():
        value = _Text(value)
    try:
        coded = _codec.encode(_plain.convert(value, "it", recorded=False))
    except Exception:  # PickleRefused, or an error of user code
        return None
    return None if coded is None or coded[1] else coded[0]


def _shown(value: object) -> str:
    try:
        return repr(value).encode(errors="backslashreplace").decode()
    except Exception:  # user code
        return f"<{type(value).__name__}>"


def _unpack_contained(kind: type[Exception], packed: Any) -> BaseException:
    args, attributes = packed
    if type(args) is not tuple or type(attributes) is not dict:
        raise SerializationError("a contained exception came malformed")
    if issubclass(kind, errors.TelegradError):
        return errors.rebuild(kind, args, attributes)
    exc = kind(*args)
    exc.__setstate__(attributes)
    return exc


def _unpack_text(packed: bytes) -> str:
    return bytes.decode(packed, errors="surrogatepass")


_plain = PlainData(_codec, RECORD_CODE, (), _MAX_DEPTH)
_plain.register(_Text, lambda text: text.encode(errors="surrogatepass"), _unpack_text)
for _kind in (*known_types().values(), RemoteError):
    _plain.register(_kind, _facts_of, functools.partial(_unpack_contained, _kind))
