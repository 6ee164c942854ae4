"""Log of a group's epochs in its store, as one worker reads and writes it.

A checkpoint holds the members at an epoch, so a newcomer reads few entries however old the group is.
"""

import logging
import threading
from typing import Any

from telegrad.errors import TelegradError
from telegrad.group import rendezvous
from telegrad.group.group_store import GroupStore, group_store_of
from telegrad.group.records import Group, Member, sealed, seat_of, unsealed
from telegrad.group.store_waits import Store
from telegrad.protocols.membership import Change, Event, GroupView, Join, Leave, Lose

__all__ = ["GroupLog", "has_members"]

logger: logging.Logger = logging.getLogger("telegrad")

_CHECKPOINT = "checkpoint"
_INTERVAL = 64  # epochs between two checkpoints
_KINDS: tuple[type, ...] = (Join, Leave, Lose)  # their index is their number in the store


class GroupLog:
    """Log of one group, and the view of its members. Any thread may use it.

    Args:
        store: Store of the group.
        group: Token and secret of the group; None to read entries without checking their origin.
        world_size: Number of members of a static group; None for a dynamic group.
    """

    def __init__(self, store: GroupStore, group: Group | None, world_size: int | None) -> None:
        self.store = store
        self.view: GroupView = GroupView(world_size)
        self.group: Group | None = group
        self._lock = threading.Lock()  # held during operations of the store: entries are applied in order

    def load(self, founders: list[Member] | None = None) -> None:
        """Read the members of the group, as a newcomer.

        Args:
            founders: Members with which a static group began.

        Raises:
            TelegradError: An entry was not made with the group's secret.
        """
        with self._lock:
            found = self.store.get(_CHECKPOINT)
            if found is not None:
                self._restore(unsealed(found, self.group))
            elif founders is not None:
                self.view.found([seat_of(member) for member in founders])
        self._refresh(strict=True)

    def refresh(self) -> list[Event]:
        """Apply new entries, except those that were not made with the group's secret."""
        return self._refresh(strict=False)

    def append(self, change: Change) -> tuple[bool, list[Event]]:
        """Write an entry for the next epoch, unless another worker has written one.

        Returns:
            Whether the entry is in the log, and the effects of the entry that is.
        """
        assert self.group is not None
        with self._lock:
            epoch = self.view.epoch + 1
            mine = sealed([epoch, _KINDS.index(type(change)), *_plain(change)], self.group)
            found = self.store.append(epoch, mine)
            if found != mine:
                return False, self._apply(found, strict=False)
            events = self.view.apply(change)
            if epoch % _INTERVAL == 0:
                self.store.set(_CHECKPOINT, sealed(self._state(), self.group))
            return True, events

    def reconnect(self, timeout: float) -> bool:
        """Connect to the store again after `StoreGone`; see `GroupStore.reconnect`."""
        group = self.group
        assert group is not None
        return self.store.reconnect(timeout, lambda store: rendezvous.is_store_of(store, group))

    def _refresh(self, strict: bool) -> list[Event]:
        with self._lock:
            return [event for entry in self.store.read(self.view.epoch + 1) for event in self._apply(entry, strict)]

    def _apply(self, entry: str, strict: bool) -> list[Event]:
        try:
            epoch, kind, *fields = unsealed(entry, self.group)
            if epoch != self.view.epoch + 1:
                raise TelegradError(f"an entry of epoch {epoch} was written for epoch {self.view.epoch + 1}")
            change = _change(kind, fields)
        except TelegradError as e:
            if strict:
                raise
            logger.warning("the entry of epoch %d of the group has no effect: %s", self.view.epoch + 1, e)
            self.view.skip()
            return []
        return self.view.apply(change)

    def _state(self) -> list[object]:
        view = self.view
        members = [list(seat.record) for seat in view.members.values()]
        return [view.epoch, members, sorted(view.owners.items()), sorted(view.latest.items())]

    def _restore(self, state: list[Any]) -> None:
        epoch, members, owners, latest = state
        view = self.view
        view.epoch, view.owners, view.latest = epoch, dict(owners), dict(latest)
        view.members = {seat.id: seat for seat in (seat_of(Member(*facts)) for facts in members)}


def has_members(store: Store) -> bool:
    """Return whether a dynamic group at a store has members."""
    log = GroupLog(group_store_of(store), None, None)
    log.load()
    return bool(log.view.members)


def _plain(change: Change) -> list[object]:
    if isinstance(change, Join):
        return [list(change.member.record), change.world_size]
    return list(change)


def _change(kind: int, fields: list[Any]) -> Change:
    if _KINDS[kind] is Join:
        facts, world_size = fields
        return Join(seat_of(Member(*facts)), world_size)
    change: Change = _KINDS[kind](*fields)
    return change
