"""Items of `telegrad.rpc.map`, as the program gives them."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from telegrad.serialize.tracebacks import is_of_signal_handler

__all__ = ["SMALL", "Source", "nbytes"]

SMALL: Final = frozenset((int, float, bool, complex, type(None)))
"""Types whose size in bytes need not be counted."""


class Source:
    """The program's items, taken in chunks.

    Args:
        items: The items.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self._items: Iterator[Any] = iter(items)
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
                items.append(item)
                if most_bytes is not None and type(item) not in SMALL:
                    left -= nbytes(item)
                    if left <= 0:
                        break
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
