"""Values as plain data, for workers with the option ``allow_pickle=False``.

The codec encodes most values. What it leaves to pickle is converted here to what it encodes:

* Containers, tensors that share memory or are lazily conjugated or negated, and long texts that occur twice in a value
  become copies.
* Sets, dtypes, devices, sizes, parameters and registered types become a `Record`: the key of the type and plain data.

A receiver makes an object from a record only if it knows the key; it imports nothing.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Container
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import torch

from telegrad import _core
from telegrad.errors import PickleRefused, SerializationError
from telegrad.serialize.module_imports import canonical
from telegrad.serialize.pickle_errors import describe_type
from telegrad.serialize.tensor_layout import is_of_transform, is_plain, memory_of

__all__ = ["PlainData", "Record", "is_own_type", "pack_dataclass", "unpack_dataclass"]

_LONG = 1024  # bytes; the codec encodes a longer text once per message (csrc/codec/encoder.cc)
_ATOMS = (type(None), bool, int, float, complex)
_ONLY = "this worker sends plain data and tensors only (option allow_pickle=False)"
_OWN_PACKAGES = frozenset(("builtins", "torch", "telegrad"))
_OWN_TYPES = frozenset((OrderedDict, partial))  # of the standard library, in messages of Telegrad
_SPARSE_HINT = (
    "this worker sends plain data and dense tensors only (option allow_pickle=False). Send its indices and values, or"
    " its to_dense(). If it is a gradient of a backward pass, let the operation make a dense one, for example by"
    " sparse=False of an embedding"
)


class Record:
    """Object of a type in plain data."""

    __slots__ = ("key", "value")

    def __init__(self, key: str, value: object) -> None:
        self.key: str = key
        self.value: object = value


class _Type(NamedTuple):
    key: str
    pack: Callable[[Any], object]
    unpack: Callable[[Any], object]


def _unpack_parameter(packed: tuple[torch.Tensor, bool]) -> torch.nn.Parameter:
    return torch.nn.Parameter(packed[0], packed[1])


def _unpack_bytearray(packed: bytes) -> bytearray:
    if type(packed) is not bytes:  # a number would be a length
        raise SerializationError("a bytearray came as something else than bytes")
    return bytearray(packed)


_DTYPES: Final = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_TYPES: Final[dict[type, _Type]] = {
    set: _Type("set", list, set),
    frozenset: _Type("frozenset", list, frozenset),
    bytearray: _Type("bytearray", bytes, _unpack_bytearray),
    torch.dtype: _Type("torch.dtype", str, _DTYPES.__getitem__),
    torch.device: _Type("torch.device", str, torch.device),
    torch.Size: _Type("torch.Size", tuple, torch.Size),
    torch.nn.Parameter: _Type(
        "torch.nn.Parameter", lambda each: (each.detach(), each.requires_grad), _unpack_parameter
    ),
}


class PlainData:
    """Conversion of one worker's values to plain data.

    Args:
        codec: Encodes the converted values; gets `Record` as an extension.
        code: Number of records in messages.
        extensions: Types that the codec encodes as well.
        max_depth: Maximum nesting of containers.
    """

    def __init__(self, codec: _core.Codec, code: int, extensions: Container[type], max_depth: int) -> None:
        self._extensions = extensions
        self._max_depth = max_depth
        self._types: dict[type, _Type] = dict(_TYPES)
        self._by_key: dict[str, _Type] = {each.key: each for each in _TYPES.values()}
        codec.register(Record, code, lambda record: (record.key, record.value), self._object_of)

    def register(self, kind: type, pack: Callable[[Any], object], unpack: Callable[[Any], object]) -> None:
        """Register how objects of exactly `kind` travel."""
        row = _Type(f"{canonical(kind.__module__)}:{kind.__qualname__}", pack, unpack)
        self._types[kind] = self._by_key[row.key] = row

    def remove(self, kind: type) -> None:
        """Remove what `register` has added."""
        row = self._types.pop(kind)
        if self._by_key.get(row.key) is row:  # another class may have the name by now
            del self._by_key[row.key]

    def convert(self, value: object, name: str | tuple[str, ...], recorded: bool) -> Any:
        """Return a copy of a value that the codec encodes.

        Args:
            value: A value that the codec does not encode as it is.
            name: Name of the value in errors, or names of a tuple's items.
            recorded: The message belongs to an autograd context.

        Raises:
            PickleRefused: A part of the value is neither plain data nor a tensor; the text has its path and type.
        """
        conversion = _Conversion(self._types, self._extensions, self._max_depth, recorded)
        if isinstance(name, str) or not isinstance(value, tuple):
            return conversion.convert(value, str(name), 1)
        return tuple(conversion.convert(part, each, 2) for each, part in zip(name, value, strict=True))

    def _object_of(self, packed: Any) -> object:
        key, value = packed
        kind = self._by_key.get(key)
        if kind is None:
            raise SerializationError(
                f"a message has an object of type {key!r:.200}, which this worker does not know. Register it with"
                " rpc.register_type."
            )
        return kind.unpack(value)


class _Conversion:
    """State of the conversion of one value."""

    def __init__(self, types: dict[type, _Type], extensions: Container[type], max_depth: int, recorded: bool) -> None:
        self._types = types
        self._extensions = extensions
        self._max_depth = max_depth
        self._recorded = recorded
        self._texts: dict[int, object] = {}  # long texts that the result contains, by id
        self._memory: dict[int, torch.Tensor] = {}  # address of memory: its tensor
        self._outer: set[int] = set()  # containers around the part

    def convert(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is str or kind is bytes:
            return self._text(value, path)
        if kind in (tuple, list, dict):
            return self._container(value, path, depth)
        if kind is torch.Tensor or (kind is torch.nn.Parameter and self._recorded and value.requires_grad):
            return self._tensor(value, path)
        row = self._types.get(kind)
        if row is not None:
            self._check_depth(value, path, depth)
            self._outer.add(id(value))
            packed = self.convert(row.pack(value), path, depth + 1)
            self._outer.discard(id(value))
            return Record(row.key, packed)
        if kind not in self._extensions:
            self._refuse(value, path)
        return value

    def _text(self, value: Any, path: str) -> Any:
        if type(value) is str:
            try:
                encoded = value.encode()
            except UnicodeEncodeError:
                raise PickleRefused(
                    f"cannot send {path}: the text is not valid Unicode; {_ONLY}: send its bytes"
                ) from None
        else:
            encoded = value
        if len(encoded) < _LONG:
            return value
        if id(value) in self._texts:
            return encoded.decode() if type(value) is str else bytes(bytearray(value))
        self._texts[id(value)] = value
        return value

    def _container(self, value: Any, path: str, depth: int) -> Any:
        self._check_depth(value, path, depth)
        self._outer.add(id(value))
        if type(value) is dict:
            made: Any = {
                self.convert(key, f"{path} (its key {_short(key)})", depth + 1): self.convert(
                    item, f"{path}[{_short(key)}]", depth + 1
                )
                for key, item in list(value.items())
            }
        else:
            made = [self.convert(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
            made = made if type(value) is list else tuple(made)
        self._outer.discard(id(value))
        return made

    def _check_depth(self, value: object, path: str, depth: int) -> None:
        if id(value) in self._outer or depth > self._max_depth:
            raise PickleRefused(f"cannot send {path:.200}: it is nested too deeply, or contains itself; {_ONLY}")

    def _tensor(self, value: torch.Tensor, path: str) -> torch.Tensor:
        if is_of_transform(value):
            self._refuse(value, path)
        value = self._resolved(value)
        if not is_plain(value.detach()):
            self._refuse(value, path)
        memory = memory_of(value)
        address = memory.address - memory.offset if memory.nbytes else 0
        if address and self._memory.setdefault(address, value) is not value:
            value = value.clone() if self._recorded else value.detach().clone().requires_grad_(value.requires_grad)
        return value

    def _resolved(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor without lazy conjugation and negation.

        Gradients of complex tensors often have it.
        """
        is_dense = value.layout is torch.strided and value.is_cpu and not value.is_nested
        if not is_dense or not (value.is_conj() or value.is_neg()):
            return value
        memory_of(value)  # torch would read past the end of a storage that is too small
        if not self._recorded:
            return value.detach().resolve_conj().resolve_neg().requires_grad_(value.requires_grad)
        with torch.inference_mode(False), torch.enable_grad():
            return value.resolve_conj().resolve_neg()

    def _refuse(self, value: object, path: str) -> NoReturn:
        kind = describe_type(value)
        if isinstance(value, torch.Tensor):
            kind += f" ({value.layout}, on {value.device}, {value.dtype})"
            if value.layout is not torch.strided:
                raise PickleRefused(f"cannot send {path}, of type {kind}: {_SPARSE_HINT}")
        raise PickleRefused(f"cannot send {path}, of type {kind}: {_ONLY}: {_remedy(value)}")


def is_own_type(kind: type) -> bool:
    """Return whether Telegrad encodes a type itself, which cannot be registered."""
    package = str(kind.__module__).partition(".")[0]
    return package in _OWN_PACKAGES or kind in _OWN_TYPES or issubclass(kind, type)


def _remedy(value: object) -> str:
    forms: dict[Any, str] = {dict: "dict(value)", list: "list(value)", (tuple, range): "tuple(value)"}
    form = next((form for kind, form in forms.items() if isinstance(value, kind)), "it in this form")
    further = "" if is_own_type(type(value)) else ", or register its type with rpc.register_type on both workers"
    return f"send {form}{further}"


def _short(value: object) -> str:
    text = repr(value) if type(value) in (*_ATOMS, str, bytes) else f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"<{type(value).__name__}>"


# ---- dataclasses


def pack_dataclass(value: Any) -> dict[str, object]:
    """Return the fields of a dataclass, and attributes that only the object has."""
    kind = type(value)
    further = {name: each for name, each in getattr(value, "__dict__", {}).items() if not hasattr(kind, name)}
    return further | {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def unpack_dataclass(kind: type[Any], values: dict[str, Any]) -> Any:
    """Create an object of a dataclass from the output of `pack_dataclass`.

    The constructor is not called: it may change the fields again.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    if (
        type(values) is not dict
        or not names <= set(values)
        or any(type(name) is not str or hasattr(kind, name) for name in set(values) - names)
    ):
        raise SerializationError(f"an object of {kind.__qualname__} came with other fields than the class has here")
    made: Any = kind.__new__(kind)  # type: ignore[call-overload]
    for name, value in values.items():
        object.__setattr__(made, name, value)  # also of a frozen class
    return made
