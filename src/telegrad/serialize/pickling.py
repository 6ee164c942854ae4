"""Pickle protocol 5 with out-of-band tensors, the fallback of the codec.

A body is

    the pickled value | the pickled tables | u64 length of the pickled value

In the pickled value a tensor is a call of `_tensor(index)`, and an object of a registered type is a call of
`_extension(index)`. The tables describe both. `Unpickler.find_class` binds the two names to the current message, so
there is no global or thread-local state and messages may nest. As in the codec, objects of registered types are packed
last, when the rest is known to be picklable, because packing may have effects (a ticket of a reference).

The segments are the alias sets of tensor memory (see `telegrad.serialize.storage_aliasing`), followed by the buffers
that objects such as numpy arrays pass to pickle.

In a recorded message all tensors that require grad are replaced by others at once, before objects that hold them are
unpickled. Tensors that are more than elements in memory (sparse ones, for example) and bare parameters are therefore
pickled separately; they have negative indices.
"""

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from telegrad import _core
from telegrad.errors import SerializationError
from telegrad.serialize import unpickling
from telegrad.serialize.module_imports import ensure_imported
from telegrad.serialize.pickle_by_value import ByValuePickler
from telegrad.serialize.pickle_error_types import as_serialization_error
from telegrad.serialize.pickle_errors import describe_type, find_unpicklable
from telegrad.serialize.plain_data import PlainData
from telegrad.serialize.storage_aliasing import Segment, TensorSlot, place, restore
from telegrad.serialize.tensor_layout import (
    MAX_OBJECTS,
    Body,
    Buffer,
    in_dual_level,
    is_plain,
    make_codec,
    refuse_tangent,
)
from telegrad.serialize.torch_types import (
    NO_GRADIENT,
    NO_NESTED_GRADIENT,
    REDUCERS,
    bare_parameters,
    is_plain_subclass,
    reduce_parameter,
    reduce_script_module,
    reduce_special_tensor,
    reduce_subclass,
)
from telegrad.serialize.unpickling import OPEN, PickleGate

__all__ = ["Extension", "Serializer"]

# Bytes. Smaller buffers are cheaper inside the pickle than as segments.
SMALLEST_SEGMENT = 1024

# torch's text, including its line breaks: programs search for parts of it.
NOT_FOUND_HINT = """ Default RPC pickler does not serialize
            function code. Ensure that UDFs are defined on both caller and
            callee modules."""

RECORD_CODE = 3  # of `plain_data.Record` among the extensions; telegrad.worker.calls.messages has the others

_MAX_DEPTH = 64  # of nested containers for the codec; deeper values are pickled

LENGTH = struct.Struct("<Q")


Wrap: TypeAlias = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class Extension(NamedTuple):
    """A type sent as a plain value: None, numbers, str, bytes, tuples, lists, dicts."""

    code: int
    pack: Callable[[Any], object]
    unpack: Callable[[Any], object]


class Tables(NamedTuple):
    """The tables after the pickled value."""

    places: list[TensorSlot]
    tensor_segments: int
    extensions: list[tuple[int, bytes]]  # code, pickled packed value
    specials: Sequence[bytes] = ()  # recorded tensors that are pickled separately, without requires_grad


class Serializer:
    """The codec and pickle of one worker, with its registered types.

    Thread-safe once the types are registered, and reentrant: pickling one message may pickle another.

    Args:
        max_objects: Maximum number of objects of a value that the codec decodes.
        gate: Permission to load pickles.
    """

    def __init__(self, max_objects: int = MAX_OBJECTS, gate: PickleGate = OPEN) -> None:
        self.gate: PickleGate = gate
        self.codec: _core.Codec = make_codec(_MAX_DEPTH, max_objects)
        self.extensions: dict[type, Extension] = {}
        self.extension_of_code: dict[int, Extension] = {}
        self.reducers: dict[type, Callable[[Any], object]] = {}
        self.plain: PlainData = PlainData(self.codec, RECORD_CODE, self.extensions, _MAX_DEPTH)

    def register(self, kind: type, code: int, pack: Callable[[Any], object], unpack: Callable[[Any], object]) -> None:
        """Register how objects of exactly `kind` are packed and unpacked.

        `pack` is called once for each object of a message, and only if the rest of the message can be sent.

        Args:
            kind: The type.
            code: Number of the type in messages.
            pack: Returns a plain value for an object.
            unpack: Returns an object for a plain value.

        Raises:
            ValueError: The type or the code is in use, or the codec encodes the type itself.
        """
        self.codec.register(kind, code, pack, unpack)
        self.extensions[kind] = self.extension_of_code[code] = Extension(code, pack, unpack)

    def register_reducer(self, kind: type, reduce: Callable[[Any], object]) -> None:
        """Register a reducer of objects of exactly `kind`, for this worker's messages.

        The first registration of a type wins. `copyreg.pickle` registers a reducer for the whole process.
        """
        self.reducers.setdefault(kind, reduce)

    def dumps(
        self, value: object, name: str | tuple[str, ...] = "value", recorded: list[torch.Tensor] | None = None
    ) -> tuple[bytes, list[Segment]]:
        """Pickle `value`.

        Args:
            value: The value to send.
            name: Name of the value in error texts; for a tuple, the names of its items.
            recorded: Gets the tensors that require grad, in the order in which `loads` wraps them. Parameters are
                included if only tuples, lists and dicts contain them, or subclasses of these. A tensor of a subclass
                is included as a plain tensor.

        Returns:
            The body, and the segments as (address, size in bytes, owner). A segment must not be read after its owner
            is dropped.

        Raises:
            SerializationError: Part of `value` cannot be pickled, or in a recorded message it cannot be sent with its
                gradient; the text names it. The error is also of the type that pickle raised, such as TypeError.
                Exceptions of the value's own methods are passed on.
        """
        message = _Outgoing(self)
        if recorded is not None:
            message.specials = []
            message.bare = bare_parameters(value)
        body = io.BytesIO()
        message.pickle_value(value, name, body)
        length = body.tell()
        extensions = message.pickle_extensions()
        specials = message.pickle_specials()
        places, segments = place(message.tensors, recorded=recorded is not None)
        if recorded is not None:
            recorded += [tensor for tensor in message.tensors if tensor.requires_grad]
            recorded += message.specials or ()
        pickle.dump(tuple(Tables(places, len(segments), extensions, specials)), body, 5)
        body.write(LENGTH.pack(length))
        return body.getvalue(), segments + message.buffers

    def loads(self, body: Body, segments: Sequence[Buffer], wrap: Wrap | None = None) -> Any:
        """Unpickle the output of `dumps`.

        Args:
            body: The body.
            segments: Writable buffers, which become the memory of tensors and arrays.
            wrap: Called once with all tensors that require grad (if any), made without requires_grad. Returns as many
                tensors, which replace them.

        Raises:
            SerializationError: The body is malformed, or it names a function or class that does not exist in this
                process (then also an AttributeError or ImportError). Exceptions of the value's own methods are passed
                on.
        """
        with memoryview(body) as view:
            value, tables = _split(view, self.gate)
            message = _Incoming(self, tables, segments, recorded=wrap is not None)
            if wrap is not None or tables.specials:
                message.take_recorded(wrap)
            return message.load(value)


class _Outgoing:
    """State of a message while it is pickled, with its out-of-band objects."""

    def __init__(self, serializer: Serializer, *, out_of_band: bool = True) -> None:
        self.serializer = serializer
        self.out_of_band = out_of_band
        self.tensors: list[torch.Tensor] = []
        self.extended: list[object] = []
        self.number_extended: dict[int, int] = {}  # id of an object in the list: its index
        self.buffers: list[Segment] = []
        self.specials: list[torch.Tensor] | None = None  # of a recorded message
        self.bare: frozenset[int] = frozenset()  # of a recorded message: ids of the parameters that travel as tensors
        self.pickler: type[Pickler] = _DualLevelPickler if in_dual_level() else Pickler

    def pickle_value(self, value: object, name: str | tuple[str, ...], file: io.BytesIO) -> None:
        keep_buffer = self._keep_buffer if self.out_of_band else None
        try:
            self.pickler(self, file, keep_buffer).dump(value)
        except (SerializationError, TypeError, AttributeError, pickle.PickleError, NotImplementedError) as error:
            self._explain(error, value, name)
        except RuntimeError as error:
            if type(error) is RuntimeError:  # of the value, as that of torch for a parametrized module
                self._explain(error, value, name)
            if not isinstance(error, RecursionError):
                raise
            what = name if isinstance(name, str) else ", ".join(name)
            raise SerializationError(f"cannot pickle {what}: it is nested too deeply") from error

    def pickle_extensions(self) -> list[tuple[int, bytes]]:
        rows = []
        for obj in self.extended:  # packed values may add to it
            extension = self.serializer.extensions[type(obj)]
            file = io.BytesIO()
            self.pickler(self, file, None).dump(extension.pack(obj))
            rows.append((extension.code, file.getvalue()))
        return rows

    def pickle_specials(self) -> list[bytes]:
        rows = []
        for tensor in self.specials or ():
            file = io.BytesIO()
            self.pickler(self, file, None).dump(tensor.detach())
            rows.append(file.getvalue())
        return rows

    def special(self, obj: Any) -> int | None:
        """Return the index of a tensor that is pickled separately, else None."""
        if self.specials is None or not obj.requires_grad:
            return None
        if type(obj) is not torch.Tensor and id(obj) not in self.bare:
            return None
        if obj.is_nested:
            raise SerializationError(NO_NESTED_GRADIENT)
        self.specials.append(obj)
        return -len(self.specials)

    def extend(self, obj: object) -> int:
        """Add an object of a registered type and return its number in the message."""
        number = self.number_extended.setdefault(id(obj), len(self.extended))
        if number == len(self.extended):
            self.extended.append(obj)
        return number

    def _keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a buffer as a segment; return True to copy it into the body instead."""
        address, nbytes = _core.buffer_address(buffer)
        if nbytes < SMALLEST_SEGMENT:
            return True
        self.buffers.append((address, nbytes, buffer))
        return False

    def _explain(self, error: Exception, value: Any, name: str | tuple[str, ...]) -> NoReturn:
        if isinstance(name, tuple):
            parts = zip(name, value, strict=True)
            name, value = next((pair for pair in parts if not self._can_pickle(pair[1])), ("value", value))
        path, part = find_unpicklable(value, name, self._can_pickle)
        raise as_serialization_error(type(error))(f"{error} (at {path}, of type {describe_type(part)})") from error

    def _can_pickle(self, value: object) -> bool:
        try:
            probe = _Outgoing(self.serializer, out_of_band=False)
            probe.specials, probe.bare = None if self.specials is None else [], self.bare
            Pickler(probe, io.BytesIO(), None).dump(value)
        except Exception:
            return False
        return True


class Pickler(ByValuePickler):
    """Pickler of one value of a message."""

    def __init__(
        self, message: _Outgoing, file: io.BytesIO, keep_buffer: Callable[[pickle.PickleBuffer], bool] | None
    ) -> None:
        super().__init__(file, keep_buffer)
        self.message = message

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        serializer = self.message.serializer
        if kind in serializer.extensions:
            return _extension, (self.message.extend(obj),)
        reduce = serializer.reducers.get(kind) or REDUCERS.get(kind)
        if reduce is not None:
            return reduce(obj)
        if kind is torch.Tensor:
            if is_plain(obj):
                self.message.tensors.append(obj)
                return _tensor, (len(self.message.tensors) - 1,)
            special = self.message.special(obj)
            return reduce_special_tensor(obj) if special is None else (_tensor, (special,))
        if kind is torch.nn.Parameter:
            special = self.message.special(obj)
            if special is not None:
                return _tensor, (special,)
            reduced = super().reducer_override(obj)
            return reduce_parameter(obj) if reduced is NotImplemented else reduced
        if self.message.specials is not None and isinstance(obj, torch.Tensor) and obj.requires_grad:
            if is_plain_subclass(obj):
                return reduce_subclass(obj)
            if not isinstance(obj, torch.nn.Parameter):  # parameters of a module belong to its copy
                raise SerializationError(NO_GRADIENT.format(kind.__qualname__))
        if isinstance(obj, torch.jit.ScriptModule):
            return reduce_script_module(obj)
        return super().reducer_override(obj)


class _DualLevelPickler(Pickler):
    """Pickler while tensors may have tangents of forward-mode differentiation."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            refuse_tangent(obj)
        return super().reducer_override(obj)


class _Incoming:
    """State of a message while it is unpickled."""

    def __init__(
        self,
        serializer: Serializer,
        tables: Tables,
        segments: Sequence[Buffer],
        *,
        recorded: bool = False,
    ) -> None:
        if tables.tensor_segments > len(segments):
            raise SerializationError(f"a message came with {len(segments)} of {tables.tensor_segments} segments")
        self.serializer = serializer
        self.tables = tables
        self.tensors: list[torch.Tensor] = restore(tables.places, segments, recorded=recorded)
        self.buffers: list[Buffer] = list(segments[tables.tensor_segments :])
        self.packed: list[tuple[int, bytes]] = tables.extensions
        self.unpacked: dict[int, object] = {}

    def take_recorded(self, wrap: Wrap | None) -> None:
        """Unpickle the separate tensors (leaves if no `wrap`); let `wrap` replace all."""
        specials = [Unpickler(self, memoryview(row), ()).load() for row in self.tables.specials]
        self.tensors += reversed(specials)
        if wrap is None:
            for tensor in specials:
                tensor.requires_grad_(True)
            return
        indices = [index for index, row in enumerate(self.tables.places) if row.requires_grad]
        indices += [-1 - index for index in range(len(specials))]
        if indices:
            for index, tensor in zip(indices, wrap([self.tensors[index] for index in indices]), strict=True):
                self.tensors[index] = tensor

    def load(self, value: memoryview) -> Any:
        try:
            return Unpickler(self, value, self.buffers).load()
        except AttributeError as error:
            if isinstance(error, SerializationError):
                raise
            raise as_serialization_error(type(error))(f"{error}{NOT_FOUND_HINT}") from error
        except (pickle.UnpicklingError, EOFError) as error:
            raise SerializationError(f"a message cannot be unpickled: {error}") from error

    def extension(self, index: int) -> object:
        """Return an object, unpacked on first use, so packed values may hold each other."""
        if index not in self.unpacked:
            code, packed = self.packed[index]
            extension = self.serializer.extension_of_code.get(code)
            if extension is None:
                raise SerializationError(f"a message has an object of type {code}, which is not registered here")
            self.unpacked[index] = extension.unpack(Unpickler(self, memoryview(packed), ()).load())
        return self.unpacked[index]


class Unpickler(unpickling.Unpickler):
    """Unpickler of one value of a message."""

    def __init__(self, message: _Incoming, data: memoryview, buffers: Sequence[Buffer]) -> None:
        super().__init__(io.BytesIO(data), gate=message.serializer.gate, buffers=buffers)
        self.message = message

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            if name == _tensor.__name__:
                return self.message.tensors.__getitem__
            if name == _extension.__name__:
                return self.message.extension
        try:
            ensure_imported(module)
            return super().find_class(module, name)
        except (AttributeError, ImportError) as error:
            raise as_serialization_error(type(error))(f"{error}{NOT_FOUND_HINT}") from error


def _tensor(index: int) -> NoReturn:
    raise SerializationError("a tensor of a remote call can only be unpickled with the call")


def _extension(index: int) -> NoReturn:
    raise SerializationError("an object of a remote call can only be unpickled with the call")


def _split(body: memoryview, gate: PickleGate) -> tuple[memoryview, Tables]:
    """Return the pickled value and the tables of a body."""
    try:
        (length,) = LENGTH.unpack_from(body, len(body) - LENGTH.size)
        tables = Tables(*gate.loads(body[length : len(body) - LENGTH.size], "a message"))
    except (struct.error, pickle.UnpicklingError, EOFError, TypeError, ValueError) as error:
        raise SerializationError("a message is truncated or malformed") from error
    return body[:length], tables
