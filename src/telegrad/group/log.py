"""Log of a group's epochs in its store, as one worker reads and writes it.

A checkpoint holds the members at an epoch, so a newcomer reads few entries however old the group is. Entries far before
it are deleted: a group that changes for months needs no more of the store. A worker that has missed as many entries has
left the group long ago.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from telegrad.errors import TelegradError
from telegrad.group import rendezvous
from telegrad.group.group_store import GroupStore, group_store_of
from telegrad.group.records import Group, Member, sealed, seat_of, unsealed
from telegrad.group.store_waits import Store
from telegrad.protocols.membership import Change, Event, GroupView, Join, Leave, Lose

__all__ = ["FellBehind", "GroupLog", "has_members"]

logger: logging.Logger = logging.getLogger("telegrad")

_CHECKPOINT = "checkpoint"
_DELETED = "deleted"
_INTERVAL = 64  # epochs between two checkpoints
_KEPT = 16 * _INTERVAL  # entries before a checkpoint that remain
_MOST_DELETED = 4 * _INTERVAL  # entries before those; the writers of some checkpoints may have died before they deleted
_KINDS: tuple[type, ...] = (Join, Leave, Lose)  # their index is their number in the store


class FellBehind(TelegradError):
    """The entries that this worker has not read exist no more."""

    def __init__(self) -> None:
        super().__init__(f"it has missed more than {_KEPT} changes of the group")


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
        self._refresh(True, ())

    def found(self, founders: list[Member]) -> None:
        """Begin as a founder of a static group, and apply what others have written since.

        Args:
            founders: Members with which the group begins.

        Raises:
            TelegradError: An entry was not made with the group's secret.
        """
        with self._lock:
            self.view.found([seat_of(member) for member in founders])
        self._refresh(True, ())

    def refresh(self) -> list[Event]:
        """Apply new entries, except those that were not made with the group's secret.

        Raises:
            FellBehind: There are new entries, but the next one exists no more.
        """
        return self._refresh(False, ())[0]

    def refresh_and_get(self, keys: Sequence[str]) -> tuple[list[Event], list[str | None]]:
        """Apply new entries as `refresh` does, and return later values of keys."""
        return self._refresh(False, keys)

    def append(self, change: Change) -> tuple[bool, list[Event]]:
        """Write an entry for the next epoch, unless another worker has written one.

        Returns:
            Whether the entry is in the log, and the effects of the entry that is.

        Raises:
            FellBehind: The entry was written where others exist no more, so no worker will read it.
        """
        assert self.group is not None
        with self._lock:
            epoch = self.view.epoch + 1
            mine = sealed([epoch, _KINDS.index(type(change)), *_plain(change)], self.group)
            found = self.store.append(epoch, mine)
            if found != mine:
                return False, self._apply(found, strict=False)
            if self._epoch_of(self.store.get(_DELETED)) >= epoch:
                raise FellBehind
            events = self.view.apply(change)
            if epoch % _INTERVAL == 0:
                self._write_checkpoint(epoch)
            return True, events

    def _write_checkpoint(self, epoch: int) -> None:
        """Write a checkpoint, and delete the entries that are too old."""
        assert self.group is not None
        self._raise_to(_CHECKPOINT, self._state())
        if epoch > _KEPT:  # the number first: a member that misses an entry finds it
            self._raise_to(_DELETED, [epoch - _KEPT, _DELETED])
            self.store.forget(range(max(epoch - _KEPT - _MOST_DELETED, 0) + 1, epoch - _KEPT + 1))

    def _raise_to(self, key: str, state: list[object]) -> None:
        """Write a state, with its epoch first, unless a later one is there."""
        assert self.group is not None
        mine = sealed(state, self.group)
        while self._epoch_of(found := self.store.get(key)) < int(str(state[0])):
            if self.store.compare_set(key, found, mine) == mine:
                return

    def _epoch_of(self, found: str | None) -> int:
        try:
            return 0 if found is None else int(unsealed(found, self.group)[0])
        except TelegradError:  # another program has written it
            return 0

    def reconnect(self, timeout: float) -> bool:
        """Connect to the store again after `StoreGone`; see `GroupStore.reconnect`."""
        group = self.group
        assert group is not None
        return self.store.reconnect(timeout, lambda store: rendezvous.is_store_of(store, group))

    def _refresh(self, strict: bool, keys: Sequence[str]) -> tuple[list[Event], list[str | None]]:
        with self._lock:
            entries, (deleted, *values) = self.store.read(self.view.epoch + 1, [_DELETED, *keys])
            events = [event for entry in entries for event in self._apply(entry, strict)]
            if self._epoch_of(deleted) > self.view.epoch:
                raise FellBehind
            return events, values

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
        self.view.restore(epoch, [seat_of(Member(*facts)) for facts in members], dict(owners), dict(latest))


def has_members(store: Store) -> bool:
    """Return whether a dynamic group at a store has members."""
    return bool(_view_of(store).members)


def has_ended(store: Store) -> bool:
    """Return whether a dynamic group at a store has had members, and has none now."""
    view = _view_of(store)
    return view.epoch > 0 and not view.members


def _view_of(store: Store) -> GroupView:
    log = GroupLog(group_store_of(store), None, None)
    log.load()
    return log.view


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
