"""Copies of values, as messages carry them."""

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from telegrad.errors import SerializationError
from telegrad.serialize.pickling import Serializer
from telegrad.serialize.storage_aliasing import Segment

__all__ = ["IMMUTABLE", "copy_by_message"]

IMMUTABLE: Final = frozenset((int, float, bool, complex, type(None), str, bytes))
"""Types of values that need no copy."""


def copy_by_message(value: object, serializer: Serializer) -> Any:
    """Encode and decode a value: the copy has all that a message would carry.

    Raises:
        SerializationError: The value cannot be sent, or contains a tensor that requires grad: its copy would not be
            part of the graph.
        Exception: Whatever encoding the value raises, for references too.
    """
    coded = serializer.codec.encode_recorded(value)
    if coded is None and not serializer.gate.is_open:
        coded = serializer.codec.encode_recorded(serializer.plain.convert(value, "value", True))
        if coded is None:
            raise SerializationError("cannot copy the value without a pickle")
    if coded is not None:
        body, segments, recorded = coded
        _require_no_gradient(recorded)
        return serializer.codec.decode(body, _copy_segments(segments))
    tensors: list[Any] = []
    body, segments = serializer.dumps(value, recorded=tensors)
    _require_no_gradient(tensors)
    return serializer.loads(body, _copy_segments(segments))


def _require_no_gradient(recorded: Sequence[object]) -> None:
    if recorded:
        raise SerializationError("cannot copy a tensor that requires grad")


def _copy_segments(segments: Sequence[Segment]) -> list[bytearray]:
    return [bytearray((ctypes.c_char * nbytes).from_address(address)) for address, nbytes, _ in segments]
