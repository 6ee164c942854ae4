"""Parts of a store, one for each group that uses it.

Several groups may use a store, one after the other or at once.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from telegrad.errors import TelegradError
from telegrad.group import rendezvous
from telegrad.group.log import has_members
from telegrad.group.store_waits import DYNAMIC, Part, Store

__all__ = ["ATTEMPT", "Part", "prefix_of"]

ATTEMPT = "attempt"
"""The key under which rank 0 announces an attempt of a run, see `telegrad.group.attempts`."""


class _Numbers:
    """Numbers of static groups, in the order in which a process joins them.

    Several workers of a process that join at the same time, at one place, with different ranks, join one group.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.next: int = 0
        self._joining: dict[tuple[str, int], tuple[int, set[int]]] = {}  # by address and size: number, ranks

    @contextmanager
    def joining(self, place: str, world_size: int, rank: int) -> Iterator[int]:
        """Yield the number of the group that a worker joins in the block.

        The group counts as complete when its first worker has joined.
        """
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
def prefix_of(store: Store, place: str, world_size: int | None, rank: int) -> Iterator[str]:
    """Yield the prefix of a store's part that a worker of this process joins.

    A store has one dynamic group: a worker that comes back must find the remaining members, however often each joined.

    Args:
        store: the store.
        place: the program's name of the store.
        world_size: None or 0 for a dynamic group.
        rank: of the worker.

    Raises:
        TelegradError: the store already has a group of the other kind.
    """
    dynamic = Part(DYNAMIC, store)
    if not world_size:
        next_one = Part(f"rpc_prefix_{_numbers.next}", store)
        if rendezvous.is_static(next_one) or next_one.check([ATTEMPT]):
            raise TelegradError(rendezvous.STATIC_AND_DYNAMIC)
        yield DYNAMIC
        return
    if rendezvous.has_met(dynamic) and has_members(dynamic):
        raise TelegradError(rendezvous.STATIC_AND_DYNAMIC)
    with _numbers.joining(place, world_size, rank) as number:
        yield f"rpc_prefix_{number}"
