"""Items of `telegrad.rpc.map`, as the program gives them."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

from telegrad.serialize.copies import IMMUTABLE
from telegrad.serialize.tracebacks import is_of_signal_handler

__all__ = ["COPIED", "SMALL", "Source", "nbytes"]

SMALL: Final = frozenset((int, float, bool, complex, type(None)))
"""Types of values that have a few bytes, which need not be counted."""

COPIED: Final = 64 << 10  # bytes of an item or result, above which a copy costs more than a chunk of its own


class Source:
    """The program's items, taken in chunks.

    Args:
        items: The items.
        copy: Returns a copy of an item that shares a message with later ones.
    """

    def __init__(self, items: Iterable[Any], copy: Callable[[Any], Any]) -> None:
        self._items: Iterator[Any] = iter(items)
        self._copy = copy
        self.taken: int = 0
        self.ended: bool = False
        self.error: Exception | None = None  # raised by the program's iterator

    def take(self, most: int, most_bytes: int | None) -> list[Any]:
        """Return the next items, fewer if they have more bytes; empty at the end.

        Args:
            most: Limit of the number.
            most_bytes: Limit of the bytes; None for none.

        Raises:
            Exception: Raised by a signal handler; `error` keeps what the program's iterator raises.
        """
        items: list[Any] = []
        left = most_bytes or 0
        try:
            for item in islice(self._items, most):
                if type(item) not in SMALL:
                    if most_bytes is not None:
                        size = nbytes(item)
                        left -= size
                        if left <= 0 or (size > COPIED and type(item) not in IMMUTABLE):
                            items.append(item)
                            break
                    if len(items) < most - 1:
                        item = self._copy(item)
                items.append(item)
            else:
                self.ended = len(items) < most
        except Exception as e:
            if is_of_signal_handler(e):
                raise
            self.error, self.ended = e, True
        self.taken += len(items)
        return items


def nbytes(value: object) -> int:
    """Estimate the bytes of a value in a message."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, (tuple, list)):
        return sum(nbytes(each) for each in value if type(each) not in SMALL) + 8 * len(value)
    if isinstance(value, dict):
        return sum(nbytes(each) for each in value.values() if type(each) not in SMALL) + 16 * len(value)
    size = getattr(value, "nbytes", None)  # of tensors, arrays and views
    return size if isinstance(size, int) else 64
