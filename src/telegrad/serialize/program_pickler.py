"""Bodies of messages that a pickler of the program encodes.

The pickler encodes the arguments of a call, or its result. What Telegrad adds to a request, such as the reference to
create, is next to its output.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from telegrad.errors import SerializationError

__all__ = ["BodyPickler", "ByPickler", "Carried", "PickledCall", "Pickler", "dump_by_pickler", "load_by_pickler"]


class Pickler(Protocol):
    """Pickler of the program: see `telegrad.rpc.use_pickler`.

    Example::

        class Plain(rpc.Pickler):
            def serialize(self, value):
                return pickle.dumps(value), []

            def deserialize(self, data, tensors):
                return pickle.loads(data)

        rpc.use_pickler(Plain())
    """

    def serialize(self, obj: Any, /) -> tuple[bytes, list[Tensor]]:
        """Return an object as bytes, and the tensors that the bytes refer to by index."""

    def deserialize(self, data: bytes, tensors: list[Tensor], /) -> Any:
        """Return the object of `serialize`, with the received tensors."""


class BodyPickler:
    """Pickler in use: encodes the bodies of messages.

    Args:
        pickler: Pickler of the program.
    """

    carries_function: bool = False
    """Whether the pickler also encodes the function of a call, and no result."""

    def __init__(self, pickler: Pickler) -> None:
        self.pickler: Pickler = pickler

    @property
    def name(self) -> str:
        """Name of the pickler in messages."""
        return type(self.pickler).__qualname__

    def call(self, function: object, args: object, kwargs: object) -> object:
        """Return what the pickler gets of a call."""
        return args, kwargs

    def items(self, value: Any) -> tuple[Any, ...]:
        """Return the items of a call's body from a decoded value of `call`.

        Raises:
            SerializationError: The pickler has returned something else.
        """
        if isinstance(value, tuple) and len(value) == len(("args", "kwargs")):
            return value
        raise SerializationError(
            f"the pickler {self.name} of rpc.use_pickler returned {value!r:.100} from deserialize, and"
            " serialize got the arguments of a call: a tuple (args, kwargs)"
        )


class ByPickler(NamedTuple):
    """Value of a message that the program's pickler encodes."""

    before: tuple[object, ...] | None  # None: the value is a result
    value: object
    after: tuple[object, ...]


class Carried(NamedTuple):
    """Arguments of a function of Telegrad around those that the pickler gets."""

    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    is_chunk: bool  # between them is the first argument, a list; else the arguments and the keyword arguments

    def around(self, values: Any, named: Any) -> tuple[Any, ...]:
        """Return the arguments of Telegrad's function."""
        return (*self.head, *((list(values[0]),) if self.is_chunk else (values, named)), *self.tail)


class PickledCall(tuple[Any, ...]):
    """Body of a request whose reply the pickler encodes as well."""

    __slots__ = ()


def dump_by_pickler(pickler: BodyPickler, value: ByPickler) -> tuple[object, ...]:
    """Return a body, to be pickled.

    Raises:
        SerializationError: The pickler has returned something else than bytes and tensors.
        Exception: Whatever the pickler raises.
    """
    result: object = pickler.pickler.serialize(value.value)
    match result:
        case (bytes() as data, list() as tensors) if all(isinstance(each, Tensor) for each in tensors):
            return pickler.name, data, tensors, value.before, value.after
    raise SerializationError(
        f"the pickler {pickler.name} of rpc.use_pickler returned {result!r:.100} from serialize: it has"
        " to return a tuple of bytes and a list of tensors"
    )


def load_by_pickler(
    pickler: BodyPickler | None,
    name: str,
    data: bytes,
    tensors: list[Tensor],
    before: Sequence[Any] | None,
    after: tuple[Any, ...],
) -> Any:
    """Return a result, or the body of a call.

    The body is a `PickledCall` if the pickler also encodes results.

    Raises:
        SerializationError: The receiver has no pickler, or the pickler has returned no arguments.
        Exception: Whatever the pickler raises.
    """
    if pickler is None:
        raise SerializationError(
            f"received a message that the sender's pickler {name} has encoded, and this worker uses no pickler. Call"
            " rpc.use_pickler on both workers before the call."
        )
    value = pickler.pickler.deserialize(data, tensors)
    if before is None:
        return value
    items = pickler.items(value)
    if before and type(before[-1]) is Carried:
        *before, carried = before
        items = carried.around(*items), {}
    body = (*before, *items, *after)
    return body if pickler.carries_function else PickledCall(body)
