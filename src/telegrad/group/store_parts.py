"""Parts of a store, one for each group that uses it.

Several groups may use a store, one after the other or at once.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from telegrad.errors import TelegradError
from telegrad.group import rendezvous
from telegrad.group.log import has_members
from telegrad.group.store_waits import DYNAMIC, Part, Store

__all__ = ["ATTEMPT", "Part", "join_open_part", "prefix_of"]

ATTEMPT = "attempt"
"""The key under which rank 0 announces an attempt of a run, see `telegrad.group.attempts`."""

_STATIC = "rpc_prefix_{}"

T = TypeVar("T")


class _Numbers:
    """Numbers of static groups, in the order of joining them at one place.

    A process that has joined groups elsewhere meets a new one, which has joined none, in the first part of a new store.
    Several workers of a process that join at the same time, at one place, with different ranks, join one group.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[str, int] = {}  # by place
        self._joining: dict[tuple[str, int], tuple[int, set[int]]] = {}  # by store and size: number, ranks

    def next(self, place: str) -> int:
        """Return the number of the next group at a place."""
        return self._next.get(place, 0)

    def use(self, place: str, number: int) -> None:
        """Note that a worker has joined the group with a number."""
        with self._lock:
            self._next[place] = max(self.next(place), number + 1)

    @contextmanager
    def joining(self, place: str, store: str, world_size: int, rank: int) -> Iterator[int]:
        """Yield the number of the group that a worker joins in the block.

        The group counts as complete when its first worker has joined.
        """
        key = store, world_size
        with self._lock:
            group = self._joining.get(key)
            if group is None or rank in group[1]:
                group = self._joining[key] = self.next(place), set()
                self._next[place] = group[0] + 1
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
        place: address of the store; empty for one that the program passes.
        world_size: None or 0 for a dynamic group.
        rank: of the worker.

    Raises:
        TelegradError: the store already has a group of the other kind.
    """
    dynamic = Part(DYNAMIC, store)
    if not world_size:
        next_one = Part(_STATIC.format(_numbers.next(place)), store)
        if rendezvous.is_static(next_one) or next_one.check([ATTEMPT]):
            raise TelegradError(rendezvous.STATIC_AND_DYNAMIC)
        yield DYNAMIC
        return
    if rendezvous.has_met(dynamic) and has_members(dynamic):
        raise TelegradError(rendezvous.STATIC_AND_DYNAMIC)
    with _numbers.joining(place, place or f"store {id(store)}", world_size, rank) as number:
        yield _STATIC.format(number)


def join_open_part(
    store: Store,
    place: str,
    prefix: str,
    join: Callable[[Part, int, int | None], T],
    rank: int,
    world_size: int | None,
) -> T:
    """Join in the first part of a store, from a prefix on, that has no ended group.

    The process of rank 0 keeps its store after a group. A process that has joined fewer groups than that one, as it has
    started later, would find the parts of groups that have ended.

    Args:
        store: the store.
        place: as for `prefix_of`.
        prefix: of the first part.
        join: joins in a part, with the rank and the world size.
        rank, world_size: of the worker.

    Returns:
        The result of `join`.
    """
    if prefix == DYNAMIC:
        return join(Part(prefix, store), rank, world_size)
    number = int(prefix.rpartition("_")[2])
    while True:
        try:
            joined = join(Part(_STATIC.format(number), store), rank, world_size)
        except rendezvous.GroupEnded:
            number += 1
            continue
        _numbers.use(place, number)
        return joined
