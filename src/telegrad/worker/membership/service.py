"""Membership of a worker while it is in a group.

The service has a thread. It renews the lease of the worker, reads new entries of the log, and writes entries for
members that have ended. Only these facts end a member:

- its goodbye, or its own entry;
- the kernel's report that its process on this host is gone;
- the expiry of its lease. A process of this host lives while the kernel says so; one that is stopped, as by a
  debugger, for as long as the failure detector allows. A process of another host lives while it answers the detector.

A lost connection is no such fact; it only makes the service check the member. Each member observes the leases of the
next two members, in the order of their ids, of those after them while these are late, and of those that it has lost the
connection to.

If the connection to the store is lost, the service connects again (`StoreOutage`). A worker that the group has removed
in the meantime finds that in the log. A silent store blocks only the service's thread; others wait for a limited time.

A worker that notifies others of a new entry sends MEMBERSHIP, with the epoch and a phase. No handler takes part: the
receiver's service reads the log and replies.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from telegrad.errors import LEFT, NotInitialized
from telegrad.group.lease import Lease, lease_key, value_of
from telegrad.group.log import FellBehind, GroupLog
from telegrad.group.process_identity import GONE, RUNNING, STOPPED, UNKNOWN, fate_of
from telegrad.group.records import Member
from telegrad.group.store_waits import StoreGone
from telegrad.internal_errors import log_internal_error
from telegrad.options import Options
from telegrad.protocols.leases import Timing, Watch, to_observe
from telegrad.protocols.membership import Change, Event, Joined, Leave, Lose, Lost
from telegrad.types import WorkerInfo
from telegrad.waits import wait_for
from telegrad.wire import Tag
from telegrad.worker.membership.events import GroupEvents
from telegrad.worker.membership.members import Members
from telegrad.worker.membership.store_outage import StoreOutage

__all__ = ["MembershipService"]

logger: logging.Logger = logging.getLogger("telegrad")

APPLIED, GREW, DRAINED = range(3)  # phases of MEMBERSHIP: reply; the log has grown; the sender may be disconnected
_REFRESH_TIMEOUT = 1.0  # s that a thread waits for the log to be read
_ACK_TIMEOUT = 0.5  # s that a worker waits for the others to read its entry
_INTERVALS = 3  # of heartbeats, within which the core loses a silent peer: csrc/core/silence.h
_STOP_TIMEOUT = 2.0  # s for the thread to release the lease, and to leave the code of the store before an exit


class Host(Protocol):
    """Worker that the service belongs to."""

    info: WorkerInfo
    incarnation: int
    host: str
    static: bool
    options: Options
    members: Members

    def add_member(self, member: Member) -> None: ...
    def remove_member(self, worker_id: int, reason: str) -> None: ...
    def lose_member(self, worker_id: int, incarnation: int, reason: str) -> None: ...
    def fence(self, why: str) -> None: ...
    def send_oneway(self, peer: int, tag: Tag, value: object) -> None: ...
    def ensure_connected(self, peers: Iterable[int]) -> None: ...


class MembershipService:
    """Membership of one worker.

    Args:
        worker: The worker.
        log: Log of its group.
        lease: Lease of the worker, which it holds.
        timing: Times of the leases of the group.
        events: Receives the changes that the program is interested in.
    """

    def __init__(self, worker: Host, log: GroupLog, lease: Lease, timing: Timing, events: GroupEvents) -> None:
        self._worker = worker
        self.log = log
        self.events = events
        self._lease = lease
        self.timing = timing
        self._changing = threading.RLock()  # entries are applied to the worker in the order of the log
        self._wake = threading.Event()
        self._stopped = False
        self._release = True  # the lease, at the end
        self.renewed: float = time.monotonic()  # when the lease was last renewed
        self.outage: StoreOutage = StoreOutage(worker.info.name, log, timing)
        self._is_member = False
        self._has_left = False
        self._suspects: deque[tuple[int, int, str, bool]] = deque()
        self._checked: dict[tuple[int, int], str] = {}  # suspects with observed leases, and what raised suspicion
        self._goodbyes: set[tuple[int, int]] = set()  # members of a static group that have said goodbye
        self._watches: dict[tuple[int, int], Watch] = {}  # by id and incarnation
        self._observation: float = 0.0  # when the next observation is due
        self._dialed: dict[tuple[int, int], float] = {}  # members with an expired lease, and since when they are dialed
        self._refreshes: deque[threading.Event] = deque()  # threads that wait for the log to be read
        self._askers: deque[tuple[int, int]] = deque()  # peers that wait for this worker to apply an epoch
        self._unapplied: set[int] = set()  # peers that have not confirmed the epoch of `announce`
        self._applied = threading.Event()
        self._stop_watch: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"telegrad-{worker.info.name}-membership", daemon=True)

    def start(self) -> None:
        """Start to renew the lease, before the worker has joined."""
        self._thread.start()

    def begin(self) -> None:
        """Start to follow the log: the worker has joined."""
        self._is_member = True
        self._stop_watch = self.log.store.watch(self.notify)
        if self._askers or self._suspects:
            self.notify()

    # ---- called by other threads

    def notify(self) -> None:
        """Have the thread read the log. Never blocks."""
        self._wake.set()

    def lease_ages(self) -> dict[int, float]:
        """Return the seconds since each observed lease has changed. Takes no lock."""
        now = time.monotonic()
        return {number: now - watch.changed for (number, _), watch in self._watches.copy().items()}

    def suspect(self, peer: int, incarnation: int, why: str, departed: bool) -> None:
        """Have the thread check a member after its connections have ended. Never blocks.

        Args:
            peer: Id of the member.
            incarnation: Its incarnation.
            why: Why the connections ended.
            departed: It sent a goodbye.
        """
        self._suspects.append((peer, incarnation, why, departed))
        self._wake.set()

    def on_message(self, peer: int, epoch: int, phase: int) -> None:
        """Handle MEMBERSHIP of a peer. Never blocks."""
        if phase == APPLIED:
            self._confirm(peer)
            return
        if phase == DRAINED:
            self._worker.remove_member(peer, LEFT)
            return
        self._askers.append((peer, epoch))
        self._wake.set()

    def refresh(self) -> None:
        """Have the thread apply new entries of the log, unless the store is gone."""
        if not self._is_member or not self._thread.is_alive():
            return
        if self._thread is threading.current_thread():
            self._read_log()
            return
        done = threading.Event()
        self._refreshes.append(done)
        self._wake.set()
        self.outage.is_late = not wait_for(done, _REFRESH_TIMEOUT)

    def append(self, change: Change, is_current: Callable[[], bool]) -> None:
        """Write an entry to the log while it is still current.

        Args:
            change: The entry.
            is_current: Returns whether it would have an effect.
        """
        with self._changing:
            written = False
            while not written and is_current():
                written, events = self.log.append(change)
                self._apply(events)

    def announce(self, phase: int = GREW) -> None:
        """Notify the connected members of an entry; wait until they have read it.

        The wait is short: a member that is late reads the entry later.
        """
        peers = set(self._worker.members.connected) & self._worker.members.ids()
        if phase == GREW:
            self._unapplied = set(peers)
            self._applied.clear()
        for peer in sorted(peers):
            self._worker.send_oneway(peer, Tag.MEMBERSHIP, (self.log.view.epoch, phase))
        if phase != GREW or not peers:
            return
        with self._worker.members.on_change(lambda: self._confirm(-1)):
            wait_for(self._applied, _ACK_TIMEOUT)

    def _confirm(self, peer: int) -> None:
        self._unapplied.discard(peer)
        self._unapplied &= set(self._worker.members.connected)
        if not self._unapplied:
            self._applied.set()

    def leave(self) -> None:
        """Write to the log that this worker leaves, and notify the others."""
        me = self._worker
        change = Leave(me.info.id, me.incarnation)
        with suppress(FellBehind):  # the group has removed it long ago
            try:
                self._end(change)
            except StoreGone:
                if not (self._thread.is_alive() and self.outage.connect_again()):
                    raise
                self._end(change)
        self._is_member, self._has_left = False, True  # the goodbyes that follow are for this worker
        self.notify()
        self.announce()

    def stop(self, release: bool = True, limit: float = 0) -> None:
        """End the thread.

        Args:
            release: Release the lease, so that the next process of this name need not wait for its expiry.
            limit: Limit in seconds of the wait for the thread, which the store may delay; 0 for the default.
        """
        self._release = self._release and release
        self._stopped = True
        self._wake.set()
        if self._stop_watch is not None:
            self._stop_watch()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(min(limit or _STOP_TIMEOUT, _STOP_TIMEOUT))

    # ---- the thread

    def _run(self) -> None:
        renewal = self.timing.renewal
        due = time.monotonic() + renewal
        reads = False  # the log in this round, since it was notified
        while True:
            reads = self._wake.wait(max(due - time.monotonic(), 0.0)) or reads
            self._wake.clear()
            if self._stopped:
                break
            try:
                now = time.monotonic()
                is_due, due = now >= due, due if now < due else now + renewal
                if is_due and not self._lease.renew():
                    self._worker.fence("another process has taken its name")
                    return
                if is_due:
                    self.renewed = now
                observes = is_due and (now >= self._observation or not self._checked.keys() <= self._watches.keys())
                if self._is_member and (reads or observes):
                    reads = True  # again, if it fails
                    self._check_members(observes)
                    reads = False
                self._reply()
                if is_due:
                    self.outage.end()
            except FellBehind as e:
                self._worker.fence(str(e))
                return
            except StoreGone as e:
                self._end_refreshes()
                pause = self.outage.reconnect(e)
                if pause is None:
                    return
                due = min(due, time.monotonic() + pause)
            except NotInitialized:  # the worker closes
                pass
            except RuntimeError as e:  # a timeout of the store
                if not self._stopped:
                    self.outage.note_silence(e)
            except Exception:  # the thread continues: without it, the others would lose this worker
                log_internal_error("internal error in the membership of %s", self._worker.info.name)
        if self._release:
            try:
                self._lease.release()
            except RuntimeError as e:
                level = logging.DEBUG if type(e) is StoreGone and not self.log.store.recovers else logging.WARNING
                logger.log(level, "worker %s could not release its lease: %s", self._worker.info.name, e)

    def _read_log(self, keys: Sequence[str] = ()) -> list[str | None]:
        """Apply new entries of the log, and return later values of keys of the store."""
        with self._changing:
            if not self._is_member:
                return [None] * len(keys)
            events, values = self.log.refresh_and_get(keys)
            self._apply(events)
            return values

    def _end_refreshes(self) -> None:
        while self._refreshes:
            self._refreshes.popleft().set()

    def _refresh(self, keys: Sequence[str] = ()) -> list[str | None]:
        asked = [self._refreshes.popleft() for _ in range(len(self._refreshes))]
        try:
            return self._read_log(keys)
        finally:
            for done in asked:
                done.set()

    def _check_members(self, observes: bool) -> None:
        observed = self._to_observe() if observes else []
        leases = self._refresh([lease_key(number) for number, _ in observed])
        while self._suspects:
            suspect = self._suspects.popleft()
            try:
                self._check(*suspect)  # this may take a while
            except RuntimeError:  # the store has failed
                self._suspects.appendleft(suspect)
                raise
            if self._refreshes:
                self._refresh()
        if observes:
            self._observe(dict(zip(observed, leases, strict=True)))

    def _reply(self) -> None:
        """Confirm to the peers that have asked that their entries are applied.

        A worker that has left confirms entries that it has not read: they do not concern it.
        """
        while self._askers and (self._is_member or self._has_left):
            peer, epoch = self._askers.popleft()
            if self._has_left or self.log.view.epoch >= epoch:
                self._worker.send_oneway(peer, Tag.MEMBERSHIP, (epoch, APPLIED))

    def _check(self, peer: int, incarnation: int, why: str, departed: bool) -> None:
        """Check a member after the end of its connections."""
        if not self.log.view.has(peer, incarnation):
            return
        if departed and not self._worker.static:
            self._end(Leave(peer, incarnation))
        elif not departed and fate_of(self._record(peer).process, has_closed=True) == GONE:
            self._end(Lose(peer, incarnation, f"its process is gone ({why})"))
        else:
            if departed:  # usually the whole group ends, perhaps with its store; if not, an observer writes the entry
                self._goodbyes.add((peer, incarnation))
            self._checked[peer, incarnation] = why

    def _to_observe(self) -> list[tuple[int, int]]:
        """Return the members whose leases are observed now: neighbors and suspects."""
        view, me = self.log.view, self._worker.info.id
        others = sorted(view.members.keys() - {me}, key=lambda number: (number < me, number))  # the next one is first
        seats = [(number, view.members[number].incarnation) for number in others]
        suspects = {key for key in self._checked if view.has(*key)}
        return sorted(to_observe(seats, self._watches, time.monotonic()) | suspects)

    def _observe(self, observed: Mapping[tuple[int, int], str | None]) -> None:
        """Judge members by the values of their leases in the store."""
        view, now = self.log.view, time.monotonic()
        self._observation = now + self.timing.observation - self.timing.renewal / 2  # with the nearest renewal
        self._checked = {key: why for key, why in self._checked.items() if view.has(*key)}
        self._goodbyes = {key for key in self._goodbyes if view.has(*key)}
        self._watches = {key: watch for key, watch in self._watches.items() if key in observed}
        self._dialed = {key: since for key, since in self._dialed.items() if key in observed}
        for key, text in observed.items():
            if not view.has(*key):  # an entry of this loop, or of another worker
                continue
            value = value_of(text, *key, self.log.group)
            watch = self._watches.get(key)
            if watch is None:
                watch = self._watches[key] = Watch(self.timing, now, value)
            watch.observe(now, value)
            if not watch.has_expired(now):
                continue
            if watch.released or key in self._goodbyes:  # even if its process goes on: it could not release the lease
                self._end(Leave(*key))
            elif not self._is_known_to_live(key, now - watch.changed):
                why = self._checked.get(key, "")
                silence = f"it has not renewed its lease for {max(now - watch.changed, watch.timing.lifetime):.3g} s"
                self._end(Lose(*key, f"{silence} ({why})" if why else silence))

    def _is_known_to_live(self, key: tuple[int, int], silence: float) -> bool:
        """Return whether a member lives `silence` seconds after its last renewal.

        A process may hold the GIL for long, or lack the connection to the store. Of another host, the core's failure
        detector knows whether it answers.
        """
        fate = fate_of(self._record(key[0]).process)
        interval = self._worker.options.local_heartbeat
        if fate == UNKNOWN:
            return self._may_answer(key)
        return fate == RUNNING or (fate == STOPPED and (interval == 0 or silence < _INTERVALS * interval))

    def _may_answer(self, key: tuple[int, int]) -> bool:
        """Return whether a member answers the failure detector, or may still."""
        worker, now = self._worker, time.monotonic()
        interval = worker.options.heartbeat
        if interval == 0:
            return False  # there is no detector
        if worker.members.connected.get(key[0]) == key[1]:
            self._dialed.pop(key, None)
            return True
        if key in self._checked:  # the detector has lost it, or its connection was closed
            return False
        if key not in self._dialed:
            self._dialed[key] = now
            worker.ensure_connected([key[0]])
        return now - self._dialed[key] < _INTERVALS * interval

    def _record(self, peer: int) -> Member:
        record: Member = self.log.view.members[peer].record
        return record

    def _end(self, change: Leave | Lose) -> None:
        self.append(change, lambda: self.log.view.has(change.id, change.incarnation))

    # ---- effects of entries

    def _apply(self, events: list[Event]) -> None:
        """Apply the effects of entries.

        The view has the entries already, so an effect that fails must not prevent the others.
        """
        for event in events:
            try:
                self._apply_one(event)
            except Exception:
                if not self._stopped:
                    log_internal_error("internal error in the membership of %s, in %s", self._worker.info.name, event)

    def _apply_one(self, event: Event) -> None:
        worker, member = self._worker, event.member
        if member.id == worker.info.id or member.name == worker.info.name:
            self._apply_to_self(event)
            return
        if isinstance(event, Joined):
            worker.add_member(member.record)
        elif isinstance(event, Lost):
            worker.lose_member(member.id, member.incarnation, event.why)
        elif not worker.static:  # a static group keeps the name; the goodbye has ended its connections
            worker.members.retire(member.id)
            if member.id not in worker.members.connected and member.id not in worker.members.lost:
                worker.remove_member(member.id, LEFT)
        self.events.add(event)

    def _apply_to_self(self, event: Event) -> None:
        worker, member = self._worker, event.member
        if isinstance(event, Joined) and member.incarnation > worker.incarnation:
            worker.fence(f"process {member.record.process or member.incarnation} has taken its name")
        elif isinstance(event, Lost) and member.incarnation == worker.incarnation:
            worker.fence(event.why)
