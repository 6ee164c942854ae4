"""Holder of a name that a newcomer asks for, as the newcomer observes it.

A lease that has expired does not end a member if no kernel reports on its process: it may have lost only its connection
to the store. So the newcomer dials the member. A member that answers keeps its name. If it does not answer, the other
live members decide: their failure detectors may still reach it. The newcomer waits until the log has lost the member.
If no other member is alive, the expired lease decides.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from telegrad.group.lease import lease_key, value_of
from telegrad.group.log import GroupLog
from telegrad.group.process_identity import GONE, RUNNING, UNKNOWN, fate_of, own_process
from telegrad.group.records import Member
from telegrad.protocols.leases import Timing, Watch, holder_of, name_of
from telegrad.protocols.membership import Event
from telegrad.protocols.membership import Member as Seat

__all__ = ["Dial", "Holder"]

_NAMED = 3  # members in a message


class Dial(Protocol):
    """Attempt to reach a member."""

    def answers(self) -> bool | None:
        """Return whether the member has answered; None while it still may."""

    def close(self) -> None:
        """End the attempt."""


class Holder:
    """Member of the name that a newcomer asks for, if the group has one.

    Args:
        log: Log of the group, which has been loaded.
        name: The name.
        timing: Times of the leases of the group.
        dial: Begins to dial a member.
        on_events: Called with the effects of the entries of the log that this object reads.
    """

    def __init__(
        self,
        log: GroupLog,
        name: str,
        timing: Timing,
        dial: Callable[[Member], Dial],
        on_events: Callable[[Sequence[Event]], object] = lambda _: None,
    ) -> None:
        self.is_alive: bool = False
        """Whether the member has answered, or the kernel reports that its process runs."""
        self.outvoted: str = ""
        """Other members that are alive, if only they can say whether this member has ended."""
        self._log = log
        self._name = name
        self._timing = timing
        self._make_dial = dial
        self._on_events = on_events
        self._seat = log.view.by_name(name)
        # Members that join later do not count: they have not observed the holder, nor has this worker observed them.
        others = [seat for seat in log.view.members.values() if seat.name != name] if self._seat is not None else []
        self._others = {(seat.id, seat.incarnation): seat for seat in others}
        self._watches: dict[tuple[int, int], Watch] = {}
        self._next_observation = 0.0
        self._dial: Dial | None = None
        self._has_dialed = False  # since the lease has expired

    def has_ended(self, watch: Watch) -> bool:
        """Return whether the newcomer may take the lease of the member over.

        Args:
            watch: Observation of the lease; no kernel has reported the end of its process.
        """
        now, seat = time.monotonic(), self._seat
        expired = watch.has_expired(now)
        if watch.released or seat is None:
            return expired
        if expired or now >= self._next_observation:
            self._observe(now)
        view = self._log.view
        if not view.has(seat.id, seat.incarnation):  # another newcomer may have the lease
            ended = name_of(watch.value) == self._name and holder_of(watch.value) <= view.latest.get(self._name, 0)
            return expired or (ended and view.by_name(self._name) is None)
        process = seat.record.process
        fate = UNKNOWN if process == own_process() else fate_of(process)
        if fate != UNKNOWN:
            self.is_alive = fate == RUNNING
            return expired and not self.is_alive
        if self._dial is None and watch.is_late(now):
            self._dial = self._make_dial(seat.record)  # so that a silent address does not prolong the wait
        return expired and self._is_given_up(seat, now)

    def _is_given_up(self, seat: Seat, now: float) -> bool:
        """Return whether neither this worker nor another member reaches the member."""
        if not self._has_dialed:
            self._has_dialed = True
            if self._dial is None or self._dial.answers() is not None:  # it may have ended since
                self.close()
                self._dial = self._make_dial(seat.record)
        assert self._dial is not None
        answers = self._dial.answers()
        self.is_alive = answers is True
        living = [key for key, watch in self._watches.items() if self._may_live(key, watch, now)]
        self.outvoted = ", ".join(self._others[key].name for key in living[:_NAMED])
        return answers is False and not living

    def _may_live(self, key: tuple[int, int], watch: Watch, now: float) -> bool:
        if watch.has_expired(now) or not self._log.view.has(*key):
            return False
        return fate_of(self._others[key].record.process) != GONE

    def _observe(self, now: float) -> None:
        """Read the log, and the leases of the other members when this is due."""
        due = now >= self._next_observation
        keys = list(self._others) if due else []
        events, values = self._log.refresh_and_get([lease_key(number) for number, _ in keys])
        self._on_events(events)
        if due:
            self._next_observation = now + self._timing.observation
        for key, text in zip(keys, values, strict=True):
            value = value_of(text, *key, self._log.group)
            if key in self._watches:
                self._watches[key].observe(now, value)
            else:
                self._watches[key] = Watch(self._timing, now, value)

    def close(self) -> None:
        """End the dial."""
        if self._dial is not None:
            self._dial.close()
            self._dial = None
