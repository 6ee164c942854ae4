"""Small value types that several parts of Telegrad share."""

import operator
import re
from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = ["MAX_WORKER_ID", "MAX_WORKER_NAME", "To", "WorkerInfo"]

MAX_WORKER_NAME: Final = 127
"""Longest name of a worker, in characters."""

MAX_WORKER_ID: Final = 2**15 - 1
"""Largest rank of a worker: ranks are sent as 16-bit integers, as in torch."""

_NAME_PATTERN: Final = "^[A-Za-z0-9-_:]*$"
_NAME: Final = re.compile(rf"[A-Za-z0-9\-_:]{{1,{MAX_WORKER_NAME}}}")


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """Name and rank of a worker.

    Immutable, hashable and picklable. Two infos are equal if both name and rank are equal.

    Args:
        name: 1 to 127 letters, digits, dashes, underscores and colons.
        id: The worker's rank, a 16-bit integer.

    Raises:
        TypeError: ``name`` is not a string, or ``id`` is not a 16-bit integer.
        RuntimeError: ``name`` does not have the form above.

    Example::

        info = rpc.get_worker_info("worker1")
        print(info.name, info.id)  # worker1 1
        rpc.rpc_sync(info, max, args=(1, 2))
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        try:
            number = operator.index(self.id)
        except TypeError:
            number = MAX_WORKER_ID + 1
        name: object = self.name
        if not isinstance(name, str) or not -MAX_WORKER_ID - 1 <= number <= MAX_WORKER_ID:
            raise TypeError(
                "__init__(): incompatible constructor arguments. WorkerInfo takes (name: str, id: int), and id has to"
                f" fit into 16 bits.\n\nInvoked with: {self.name!r}, {self.id!r}"
            )
        if not _NAME.fullmatch(self.name):
            raise RuntimeError(
                f"Worker name must match {_NAME_PATTERN}, and must be non-empty and shorter than"
                f" {MAX_WORKER_NAME + 1} chars, but got {self.name}"
            )
        object.__setattr__(self, "id", number)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


To: TypeAlias = str | int | WorkerInfo
"""Worker argument of a call: name, rank or info."""
