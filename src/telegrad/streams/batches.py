"""Batches: items of a stream that travel in one reply.

A reply is encoded when the batch is complete, but the generator may change an item right after it has yielded it. So
only items that later steps cannot change share a batch: immutable values, and copies of small ones. Any other item has
a batch of its own, which is encoded before the generator continues.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "CLOSED",
    "ENDED",
    "LIVE",
    "NO_STREAM",
    "OPEN",
    "SOLITARY",
    "Batch",
    "State",
    "WireBatch",
    "copy_item",
    "size_of",
]

_SMALL: Final = 64 << 10  # bytes of an item, above which a copy costs more than a call of its own
_FEW: Final = 64  # items of a container, for the same reason
_DEPTH: Final = 4  # of nested containers
_WORD: Final = 8  # bytes of a number

SOLITARY: Final = object()
"""Result of `copy_item` for an item that needs a batch of its own."""

_IMMUTABLE: Final = frozenset({int, float, bool, complex, type(None)})
_TEXT: Final = frozenset({str, bytes})
_KEYS: Final = frozenset({str, int})
_LISTS: Final = frozenset({tuple, list})


class State(IntEnum):
    """State of a stream after a batch."""

    OPEN = 0  # the callee may hold items back while the generator runs
    LIVE = 1  # open, and the callee holds no item back
    ENDED = 2
    CLOSED = 3  # before its end


OPEN, LIVE, ENDED, CLOSED = map(int, State)  # operations of enums take microseconds


class Batch(NamedTuple):
    """Items of a stream, in order."""

    first: int  # number of the first item; -1 in `NO_STREAM`
    state: int  # a `State`
    size: int  # bytes of a solitary item; 0 for others, which are small
    items: list[Any]


WireBatch: TypeAlias = tuple[int, int, int, list[Any]]
"""Batch as the codec encodes it."""


NO_STREAM: Final[WireBatch] = (-1, CLOSED, 0, [])
"""Reply to a request for items of a stream that is not open: the reader has closed it, or its session has ended."""


def copy_item(item: object) -> object:
    """Return an equal item that later steps of the generator cannot change.

    Returns:
        The item itself if it is immutable, a copy if that is cheap; otherwise `SOLITARY`.
    """
    kind = type(item)
    if kind in _IMMUTABLE:
        return item
    if kind is Tensor and isinstance(item, Tensor):
        return item.clone() if _is_small(item) else SOLITARY
    return _Copier().copy(item, _DEPTH)


class _Copier:
    """Copies one item, if all of it is small."""

    def __init__(self) -> None:
        self._left = _SMALL  # bytes
        self._found: set[int] = set()  # addresses of containers and of the memory of tensors

    def copy(self, item: object, depth: int) -> object:
        """Copy an item or a part of it, or return `SOLITARY`.

        Args:
            item: The item.
            depth: Most levels of containers within.
        """
        kind = type(item)
        if kind in _IMMUTABLE:
            return item if self._has_room(_WORD) else SOLITARY
        if isinstance(item, (str, bytes)):
            return item if kind in _TEXT and self._has_room(len(item)) else SOLITARY
        if isinstance(item, Tensor):
            if kind is not Tensor or not _is_small(item) or not self._has_room(item.nbytes):
                return SOLITARY
            return item.clone() if self._is_new(item.untyped_storage().data_ptr()) else SOLITARY
        if not depth or not self._is_new(id(item)):
            return SOLITARY
        copies: Iterable[object]
        if isinstance(item, (tuple, list)) and kind in _LISTS and len(item) <= _FEW:
            copies = [self.copy(each, depth - 1) for each in item]
            return SOLITARY if any(each is SOLITARY for each in copies) else tuple(copies) if kind is tuple else copies
        if isinstance(item, dict) and kind is dict and len(item) <= _FEW and _KEYS.issuperset(map(type, item)):
            copies = [self.copy(each, depth - 1) for each in item.values()]
            return SOLITARY if any(each is SOLITARY for each in copies) else dict(zip(item, copies, strict=True))
        return SOLITARY

    def _has_room(self, nbytes: int) -> bool:
        self._left -= nbytes
        return self._left >= 0

    def _is_new(self, address: int) -> bool:
        """Return whether this is found for the first time.

        Parts that are one object, or share memory, arrive so.
        """
        if address in self._found:
            return False
        self._found.add(address)
        return True


def _is_small(tensor: Tensor) -> bool:
    """Return whether a tensor has all its memory and is cheap to copy."""
    return (
        tensor.layout is torch.strided
        and (nbytes := tensor.nbytes) <= _SMALL
        and not tensor.requires_grad
        and tensor.is_cpu  # costs a fifth of `device.type`
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + nbytes
        and not (nbytes and tensor.data_ptr() == 0)
    )


def size_of(item: object, depth: int = _DEPTH) -> int:
    """Return the bytes of the tensors and texts in an item.

    Objects of other types count as 0.
    """
    if isinstance(item, Tensor):
        return item.nbytes if item.layout is torch.strided else 0
    if isinstance(item, (str, bytes)):
        return len(item)
    if isinstance(item, (tuple, list)) and depth:
        return sum(size_of(each, depth - 1) for each in item)
    if isinstance(item, dict) and depth:
        return sum(size_of(each, depth - 1) for each in item.values())
    return 0
