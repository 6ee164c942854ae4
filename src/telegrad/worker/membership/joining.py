"""Join and leave a group.

A newcomer reserves an id and an incarnation, connects to the members (`telegrad.protocols.joining`), and writes its
entry to the log of the group. If it fails or dies before that, the group has not changed. If it dies afterwards, it is
a member that has died. No step waits for a handler of a member.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from telegrad.errors import TelegradError, WorkerLost
from telegrad.group.group_store import group_store_of
from telegrad.group.lease import read_lease
from telegrad.group.log import GroupLog
from telegrad.group.process_identity import GONE, fate_of
from telegrad.group.records import Group, Member, seat_of
from telegrad.group.reservation import Reservation, require_end, reserve
from telegrad.group.store_waits import Store, StoreGone, StoreUnresponsive, within
from telegrad.options import Options
from telegrad.protocols.joining import Newcomer, Refusal
from telegrad.protocols.membership import Join, Joined
from telegrad.timeouts import SharedDeadline
from telegrad.types import WorkerInfo
from telegrad.waits import Wait, wait_for
from telegrad.wire import Loss
from telegrad.worker.autograd_hooks import WorkerPlugins
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.interceptors import internal
from telegrad.worker.membership.events import GroupEvents
from telegrad.worker.membership.holder_dial import HolderDial
from telegrad.worker.membership.service import DRAINED, MembershipService
from telegrad.worker.worker import Worker

__all__ = ["create_worker", "join_dynamic", "leave_dynamic", "rejoin_static", "serve"]

logger: logging.Logger = logging.getLogger("telegrad")

_LEASE_POLL = 0.2  # s between two checks of the leases of members that have not answered
_RECONNECTS = 3  # attempts after a connection that a member has closed
_DISCONNECT_TIMEOUT = 1.0  # s for the members to disconnect a worker that has left


def join_dynamic(
    store: Store,
    name: str,
    rank: int,
    group: Group,
    options: Options,
    store_at: str,
    plugins: WorkerPlugins,
    timeout: float,
) -> Worker:
    """Join a dynamic group; the live members know the new worker on return.

    Args:
        store: Store of the group.
        name: Name of the new worker.
        rank: Id of the new worker; negative for the previous id of the name, or a new one.
        group: Token and secret of the group.
        options: Options of the worker.
        store_at: Host of the store.
        plugins: Plugins of the worker.
        timeout: Limit in seconds of the wait for the lease of an earlier process of this name.

    Raises:
        RuntimeError: A live worker has the name or the rank, or cannot be reached.
    """
    log = GroupLog(group_store_of(store), group, None)
    log.load()
    wait = Wait(f"{name}{f' (rank {rank})' if rank >= 0 else ''}", timeout)
    reservation = reserve(log, name, rank, options, wait, partial(HolderDial, group=group, options=options))
    worker, service = create_worker(reservation, log, group, options, store_at, plugins)
    worker.static = False
    _enter(worker, service, store, worker.member)
    return worker


def rejoin_static(
    store: Store,
    info: WorkerInfo,
    group: Group,
    founders: list[Member],
    options: Options,
    store_at: str,
    plugins: WorkerPlugins,
    devices: tuple[object, ...],
    wait: Wait,
) -> Worker:
    """Come back to a static group as a new process.

    Args:
        store: Store of the group.
        info: Name and rank of the worker.
        group: Token and secret of the group.
        founders: Members with which the group began.
        options: Options of the worker.
        store_at: Host of the store.
        plugins: Plugins of the worker.
        devices: Devices of the worker.
        wait: Wait for the lease of the earlier process.

    Raises:
        RuntimeError: The earlier process is alive, the group was not given a secret, or a member cannot be reached.
    """
    log = GroupLog(group_store_of(store), group, len(founders))
    log.load(founders)
    dial = partial(HolderDial, group=group, options=options)
    reservation = reserve(log, info.name, info.id, options, wait, dial)
    if group.shared_secret:
        reservation.lease.release()
        raise TelegradError(
            f"worker {info.name} cannot come back to its static group: the random secret of the group was removed from"
            " its store when all members had joined. Give the group a secret (TELEGRAD_SECRET) before it starts."
        )
    worker, service = create_worker(reservation, log, group, options, store_at, plugins)
    _enter(worker, service, store, worker.member._replace(devices=devices), founders)
    return worker


def create_worker(
    reservation: Reservation,
    log: GroupLog,
    group: Group,
    options: Options,
    store_at: str,
    plugins: WorkerPlugins,
) -> tuple[Worker, MembershipService]:
    """Create the worker of a reservation, and renew its lease.

    Args:
        reservation: Its id and incarnation.
        log: Log of its group.
        group: Token and secret of the group.
        options: Options of the worker.
        store_at: Host of the store.
        plugins: Plugins of the worker.
    """
    info, incarnation, lease, timing = reservation
    try:
        worker = Worker(info, group, options, store_at, incarnation, plugins)
    except BaseException:
        lease.release()
        raise
    service = MembershipService(worker, log, lease, timing, GroupEvents(worker._submit))
    worker.membership = service
    service.start()
    return worker, service


def _enter(
    worker: Worker, service: MembershipService, store: Store, member: Member, founders: Sequence[Member] = ()
) -> None:
    """Enter the group; the live members know the worker on return.

    If that fails, the worker is closed.

    Args:
        worker: The new worker.
        service: Its membership.
        store: Store of the group.
        member: Its record.
        founders: Members with which a static group began.
    """
    try:
        others = [founder for founder in founders if founder.id != worker.info.id]
        if founders:
            worker.shutdown.set_members([founder.id for founder in others])
        for founder in others:
            if founder.id not in service.log.view.members:  # lost: it may come back as well
                worker.add_member(founder)
                worker.shutdown.peer_gone(founder.id, False)
        commit(worker, service, member)
        serve(worker, service, store)
    except BaseException:
        worker.close()
        raise
    service.announce()


def serve(worker: Worker, service: MembershipService, store: Store) -> None:
    """Complete the join of a worker that is in the log: requests may run."""
    worker.store = store
    worker.ready.set()
    service.begin()


def commit(worker: Worker, service: MembershipService, member: Member) -> None:
    """Connect to the members of the group, and write the entry of this worker.

    Args:
        worker: The new worker.
        service: Its membership.
        member: Its record.

    Raises:
        RuntimeError: A live member cannot be reached or refuses this worker, or the name or rank is taken.
    """
    log = service.log
    join = Join(seat_of(member), log.view.world_size)
    reach = _Reach(worker, service)
    dial = partial(HolderDial, group=worker.group, options=worker.options)
    while True:
        log.view.check(join)
        if log.view.is_superseded(join.member):
            raise TelegradError(
                f"worker {member.name} cannot join the group: another process has taken its name in the meantime."
            )
        reach.connect()
        written, events = log.append(join)
        if written:
            break
        news = deque([*events, *log.refresh()])  # another worker was faster
        while news:
            event = news.popleft()
            if isinstance(event, Joined) and event.member.name == member.name and event.member.id != member.id:
                wait = Wait(member.name, service.timing.lifetime)
                require_end(log, event.member, member.id, service.timing, wait, dial, news.extend)
            if not isinstance(event, Joined):
                reach.newcomer.drop(event.member.id)
                worker.members.retire(event.member.id)
    for seat in log.view.members.values():
        if seat.id in reach.ended:
            service.suspect(seat.id, seat.incarnation, reach.ended[seat.id], False)


class _Reach:
    """Connections of a newcomer to the members of its group."""

    def __init__(self, worker: Worker, service: MembershipService) -> None:
        self._worker = worker
        self._log = service.log
        self._timing = service.timing
        self.newcomer = Newcomer(self._timing)
        self.ended: dict[int, str] = {}  # members without a process, and what the connection reported
        self._changed = threading.Event()
        self._pings: dict[int, CallFuture[None]] = {}
        self._closed: dict[int, int] = {}  # connections to each member that ended before they were used

    def connect(self) -> None:
        """Connect to all members, except those that have ended or are silent.

        Raises:
            TelegradError: A live member cannot be reached, or refuses this worker.
        """
        try:
            self._connect()
        finally:
            for ping in self._pings.values():
                ping.cancel()
            self._pings.clear()

    def _connect(self) -> None:
        worker, newcomer, members = self._worker, self.newcomer, self._log.view.members
        limit = worker.options.connect_timeout  # calls that wait for a connection end by then
        wait = Wait(worker.info.name, limit + worker.options.handshake_timeout if limit else math.inf)
        with worker.members.on_change(self._changed.set):
            for seat in members.values():
                if seat.name == worker.info.name:
                    continue
                if newcomer.require(seat.id, time.monotonic(), self._lease_of(seat.id)):
                    worker.add_member(seat.record)
                    self._ping(seat.id)
            observed = time.monotonic()
            while newcomer.waiting_for():
                wait_for(self._changed, _LEASE_POLL)
                self._changed.clear()
                self._read_results()
                now = time.monotonic()
                if now - observed >= _LEASE_POLL:
                    observed = now
                    for number in newcomer.waiting_for():
                        newcomer.observe(number, now, self._lease_of(number))
                refusal = newcomer.judge(now)
                if refusal is None and newcomer.waiting_for() and not wait.left:
                    refusal = Refusal(newcomer.waiting_for()[0], "it did not complete the handshake in time")
                if refusal is not None:
                    raise self._error(refusal)
                wait.step(self._awaited)
        for number in newcomer.silent:
            logger.warning(
                "worker %s joins without a connection to worker %s, which neither answers nor renews its lease",
                worker.info.name,
                worker.members.name_of(number),
            )

    def _ping(self, number: int) -> None:
        future = self._worker.start_internal(number, _ping, (), 0)
        self._pings[number] = future
        future.add_done_callback(lambda _: self._changed.set())

    def _read_results(self) -> None:
        """Pass the connections that have opened or failed to the rules."""
        for number, ping in list(self._pings.items()):
            if number in self._worker.members.connected:
                self.newcomer.connected(number)
                ping.cancel()  # the connection is enough: its handler may be busy
                del self._pings[number]
            elif ping.done():
                del self._pings[number]
                try:
                    ping.wait()
                    # The reply may be faster than the event that the connection is open.
                    self._worker.members.mark_connected(number, self._log.view.members[number].incarnation)
                    self.newcomer.connected(number)
                except RuntimeError as e:
                    if isinstance(e, WorkerLost):
                        self._failed(number, e.why, e._loss)
                    else:
                        self._failed(number, str(e), Loss.OTHER)

    def _failed(self, number: int, why: str, loss: int) -> None:
        seat = self._log.view.members[number]
        if fate_of(seat.record.process) == GONE:
            self.ended[number] = why
            self.newcomer.forget(number)
        elif loss == Loss.CLOSED and self._closed.setdefault(number, 0) < _RECONNECTS:
            # The member has closed the connections of the previous process of this name.
            self._closed[number] += 1
            self._worker.add_member(seat.record)
            self._ping(number)
        else:
            self.newcomer.failed(number, why, refused=loss == Loss.REFUSED)

    def _lease_of(self, number: int) -> str | None:
        return read_lease(self._log.store, number, self._log.group, self._log.view.members[number].incarnation)

    def _awaited(self) -> tuple[str, str]:
        names = [f"{self._worker.members.name_of(n)} (rank {n})" for n in self.newcomer.waiting_for()]
        return f"a connection to {', '.join(names)}", "no answer"

    def _error(self, refusal: Refusal) -> TelegradError:
        name = self._worker.members.name_of(refusal.member)
        return TelegradError(
            f"worker {self._worker.info.name} cannot join the group, because it has no connection to its live member"
            f" {name} (rank {refusal.member}): {refusal.why}. The group has not changed. Check addresses, firewalls,"
            " secrets and versions of both."
        )


def _ping() -> None:
    """Do nothing; a newcomer connects with a call of this."""


internal.add(_ping)


def leave_dynamic(worker: Worker, budget: SharedDeadline, on_drained: Callable[[], object]) -> bool:
    """Leave the group after all pending work.

    No further calls get to this worker; at the end, the members disconnect.

    Args:
        worker: The worker.
        budget: Limit of the whole.
        on_drained: Called when no work is pending, before the members know.

    Returns:
        False if work was still pending after the limit. Then the worker is still connected: its pending calls fail when
        it closes, with its own error instead of the loss of their callees.
    """
    service = worker.membership
    assert service is not None
    try:
        within(min(budget.left() or service.timing.lifetime, service.timing.lifetime), service.leave)
    except StoreGone as e:
        logger.warning(
            "worker %s leaves its group without the store; its host %s: %s",
            worker.info.name,
            "does not reply" if isinstance(e, StoreUnresponsive) else "has gone",
            str(e).partition("\n")[0],
        )
    if not worker.shutdown.drain(budget.left()):
        return False
    on_drained()
    gone = threading.Event()

    def check() -> None:
        if not worker.members.connected:
            gone.set()

    with worker.members.on_change(check):
        service.announce(DRAINED)
        check()
        wait_for(gone, min(budget.left() or _DISCONNECT_TIMEOUT, _DISCONNECT_TIMEOUT))
    return True
