"""Bodies of messages that a pickler of the program encodes.

The pickler encodes the arguments of a call, or its result. What Telegrad adds to a request, such as the reference to
create, is next to its output.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from telegrad.errors import SerializationError

__all__ = ["ByPickler", "PickledCall", "Pickler", "dump_by_pickler", "load_by_pickler"]


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


class ByPickler(NamedTuple):
    """Value of a message that the program's pickler encodes."""

    before: tuple[object, ...] | None  # None: the value is a result
    value: object
    after: tuple[object, ...]


class PickledCall(tuple[Any, ...]):
    """Body of a request that the caller's pickler has encoded."""

    __slots__ = ()


def dump_by_pickler(pickler: Pickler, value: ByPickler) -> tuple[object, ...]:
    """Return a body, to be pickled.

    Raises:
        SerializationError: The pickler has returned something else than bytes and tensors.
        Exception: Whatever the pickler raises.
    """
    result: object = pickler.serialize(value.value)
    match result:
        case (bytes() as data, list() as tensors) if all(isinstance(each, Tensor) for each in tensors):
            return type(pickler).__qualname__, data, tensors, value.before, value.after
    raise SerializationError(
        f"the pickler {type(pickler).__qualname__} of rpc.use_pickler returned {result!r:.100} from serialize: it has"
        " to return a tuple of bytes and a list of tensors"
    )


def load_by_pickler(
    pickler: Pickler | None,
    name: str,
    data: bytes,
    tensors: list[Tensor],
    before: tuple[Any, ...] | None,
    after: tuple[Any, ...],
) -> Any:
    """Return a result, or a `PickledCall`.

    Raises:
        SerializationError: The receiver has no pickler, or the pickler has returned no arguments.
        Exception: Whatever the pickler raises.
    """
    if pickler is None:
        raise SerializationError(
            f"received a message that the sender's pickler {name} has encoded, and this worker uses no pickler. Call"
            " rpc.use_pickler on both workers before the call."
        )
    value = pickler.deserialize(data, tensors)
    if before is None:
        return value
    if not isinstance(value, tuple) or len(value) != len(("args", "kwargs")):
        raise SerializationError(
            f"the pickler {type(pickler).__qualname__} of rpc.use_pickler returned {value!r:.100} from deserialize, and"
            " serialize got the arguments of a call: a tuple (args, kwargs)"
        )
    return PickledCall((*before, *value, *after))
