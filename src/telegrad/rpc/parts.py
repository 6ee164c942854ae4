"""Which part of a store belongs to a group, where several use the store, one after the other or at once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from telegrad.errors import TelegradError
from telegrad.worker import rendezvous

__all__ = ["ATTEMPT", "Part", "part_of"]

ATTEMPT = "attempt"
"""The key under which rank 0 announces an attempt of a run, see `telegrad.rpc.attempts`."""


class Part(dist.PrefixStore):  # type: ignore[name-defined,misc]
    """A part of a store, which keeps the whole: that may be written in Python, and torch's keeps only its C++ side."""

    def __init__(self, prefix: str, whole: Any) -> None:
        super().__init__(prefix, whole)
        self._whole = whole


class _Numbers:
    """Static groups are told apart by the order in which a process joins them.

    Several workers of a process that join at the same time, at one place, each with a rank of its own, join one group.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.next: int = 0
        self._joining: dict[tuple[str, int], tuple[int, set[int]]] = {}  # by place and size: number, ranks

    @contextmanager
    def joining(self, place: str, world_size: int, rank: int) -> Iterator[int]:
        """The number of the group that a worker joins meanwhile. A group is complete when the first has joined."""
        key = place, world_size
        with self._lock:
            group = self._joining.get(key)
            if group is None or rank in group[1]:
                group = self._joining[key] = self.next, set()
                self.next += 1
            group[1].add(rank)
        try:
            yield group[0]
        finally:
            with self._lock:
                if self._joining.get(key) is group:
                    del self._joining[key]


_numbers = _Numbers()


@contextmanager
def part_of(store: Any, place: str, world_size: int | None, rank: int) -> Iterator[Any]:
    """The part of a store in which a worker of this process meets the others of its group.

    Of groups whose members come and go there is one on a store, since a worker that comes back
    must find those that stayed, however often each joined.

    Args:
        place: what the program calls the store.
        world_size: None or 0 if members come and go.

    Raises:
        TelegradError: a group of the other kind is there.
    """
    dynamic = Part("rpc_dynamic", store)
    if not world_size:
        next_one = Part(f"rpc_prefix_{_numbers.next}", store)
        if rendezvous.is_static(next_one) or next_one.check([ATTEMPT]):
            raise TelegradError(rendezvous.STATIC_AND_DYNAMIC)
        yield dynamic
        return
    if rendezvous.has_members(dynamic):
        raise TelegradError(rendezvous.STATIC_AND_DYNAMIC)
    with _numbers.joining(place, world_size, rank) as number:
        yield Part(f"rpc_prefix_{number}", store)
