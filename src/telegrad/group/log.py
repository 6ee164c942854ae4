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
from telegrad.group.group_store import GroupStore, group_store_of, log_key
from telegrad.group.records import Group, Member, read_member, sealed, seat_of, unsealed
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
        self._untold: list[Event] = []  # effects of applied entries that no caller has got
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
                self.view.restore(*unsealed(_CHECKPOINT, found, self.group, _state))
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
            plain = [epoch, _KINDS.index(type(change)), *_plain(change)]
            mine = sealed(log_key(epoch), plain, self.group)
            found = self.store.append(epoch, mine)
            if found != mine:
                self._apply(found, strict=False)
                return False, self._news()
            if self._deleted_after_append(epoch) >= epoch:
                raise FellBehind
            self._untold += self.view.apply(change)
            if epoch % _INTERVAL == 0:
                try:
                    self._write_checkpoint(epoch)
                except RuntimeError as e:  # the entry is in the log all the same
                    logger.warning("the checkpoint of epoch %d of the group was not written: %s", epoch, e)
            return True, self._news()

    def _deleted_after_append(self, epoch: int) -> int:
        """Return the last epoch without its entry; 0 if the store does not reply.

        The entry is in the log then, and the next read of the log notices if the worker has fallen behind.
        """
        try:
            return self._epoch_of(_DELETED, self.store.get(_DELETED))
        except RuntimeError as e:
            logger.debug("the last deleted entry was not read after the entry of epoch %d: %s", epoch, e)
            return 0

    def _write_checkpoint(self, epoch: int) -> None:
        """Write a checkpoint, and delete the entries that are too old."""
        assert self.group is not None
        self._raise_to(_CHECKPOINT, self._plain_state())
        if epoch > _KEPT:  # the number first: a member that misses an entry finds it
            self._raise_to(_DELETED, [epoch - _KEPT])
            self.store.forget(range(max(epoch - _KEPT - _MOST_DELETED, 0) + 1, epoch - _KEPT + 1))

    def _raise_to(self, key: str, state: list[object]) -> None:
        """Write a state, with its epoch first, unless a later one is there."""
        assert self.group is not None
        mine = sealed(key, state, self.group)
        while self._epoch_of(key, found := self.store.get(key)) < int(str(state[0])):
            if self.store.compare_set(key, found, mine) == mine:
                return

    def _epoch_of(self, key: str, found: str | None) -> int:
        try:
            return 0 if found is None else unsealed(key, found, self.group, lambda epoch, *_: int(epoch))
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
            for entry in entries:
                self._apply(entry, strict)
            if self._epoch_of(_DELETED, deleted) > self.view.epoch:
                raise FellBehind
            return self._news(), values

    def _news(self) -> list[Event]:
        """Return the effects that no caller has got. Requires the lock.

        An error may have kept back the effects of entries before it.
        """
        events, self._untold = self._untold, []
        return events

    def _apply(self, entry: str, strict: bool) -> None:
        epoch = self.view.epoch + 1
        try:
            of, change = unsealed(log_key(epoch), entry, self.group, _change)
            if of != epoch:
                raise TelegradError(f"an entry of epoch {of} was written for epoch {epoch}")
        except TelegradError as e:
            if strict:
                raise
            logger.warning("the entry of epoch %d of the group has no effect: %s", epoch, e)
            self.view.skip()
        else:
            self._untold += self.view.apply(change)

    def _plain_state(self) -> list[object]:
        view = self.view
        members = [list(seat.record) for seat in view.members.values()]
        return [view.epoch, members, sorted(view.owners.items()), sorted(view.latest.items())]


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


def _change(epoch: int, kind: int, *fields: Any) -> tuple[int, Change]:
    """Return the epoch and the change of an entry."""
    if _KINDS[kind] is Join:
        facts, world_size = fields
        return epoch, Join(seat_of(read_member(facts)), world_size)
    number, incarnation, *why = fields
    change: Change = _KINDS[kind](int(number), int(incarnation), *map(str, why))
    return epoch, change


def _state(epoch: int, members: list[Any], owners: list[Any], latest: list[Any]) -> tuple[Any, ...]:
    """Return the arguments of `GroupView.restore` from a checkpoint."""
    names = {int(number): str(name) for number, name in owners}
    newest = {str(name): int(incarnation) for name, incarnation in latest}
    return int(epoch), [seat_of(read_member(facts)) for facts in members], names, newest
