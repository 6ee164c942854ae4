"""Members of a worker's group, and the workers that have left it."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from telegrad.errors import LEFT, UnknownWorker, WorkerLost
from telegrad.group.rendezvous import Member
from telegrad.protocols.membership import ordinal_of
from telegrad.types import WorkerInfo
from telegrad.wire import LossText
from telegrad.worker.losses import Losses, LossReason

__all__ = ["MAX_RETIRED", "Members", "NotAWorker"]

MAX_RETIRED = 4096
"""Workers that have left a dynamic group and are remembered, for messages."""


class NotAWorker(ValueError, TypeError):
    """Value that is no name, id or info of a worker; torch raises either class for it."""


class Members:
    """Table of the workers that one worker knows.

    Args:
        info: Name and id of this worker.
        refresh: Adds recent members of a dynamic group; called for an unknown name or id.
        incarnation: Incarnation of this worker.
    """

    def __init__(self, info: WorkerInfo, refresh: Callable[[], None], incarnation: int = 0) -> None:
        self.by_key: dict[str | int, WorkerInfo] = {info.name: info, info.id: info}  # never replaced: the core holds it
        self.lost: dict[int, str] = {}  # workers that are gone, and the reason
        self.departed: set[int] = set()  # lost workers that sent a goodbye
        self.removed: set[int] = set()  # lost workers with which no further session begins
        self.gone_at_shutdown: set[int] = set()  # lost workers by agreement of the group when its shutdown began
        self.listeners: list[Callable[[], object]] = []  # called when a worker joins, connects, leaves or is lost
        self.session_listeners: list[Callable[[int, LossReason], object]] = []  # called when a session has ended
        self.connected: dict[int, int] = {}  # incarnations of the workers with an open connection
        self.losses: Losses = Losses()
        self._info = info
        self._refresh = refresh
        self._ends: dict[str | int, tuple[WorkerInfo, str, int]] = {}  # of retired workers: info, reason, incarnation
        self._members: dict[int, Member] = {}
        self._retired: dict[int, str] = {}  # ids and names of workers that have left the group, the first one first
        self._incarnations: dict[int, int] = {info.id: incarnation}  # of the newest known processes
        self._names: dict[int, str] = {info.id: info.name}  # also of retired ids, for messages
        self._lock = threading.Lock()

    # ---- membership

    def add(self, member: Member) -> bool:
        """Add a member, or replace the previous one with the same id.

        Returns:
            Whether another incarnation had the id, or a worker that has left.
        """
        info = WorkerInfo(member.name, member.id)
        with self._lock:
            known = self._members.get(member.id)
            self._names[member.id] = member.name
            was_retired = member.id in self._retired
            replaced = known is not None and known.incarnation != member.incarnation
            if known is not None and replaced:
                self.losses.record(member.id, known.incarnation, f"{LossText.REPLACED} {member.name}")
            if replaced or was_retired:  # the loss is of the previous process: `lost_processes`
                self.mark_present(member.id)
            self._members[member.id] = member
            self._incarnations[member.id] = member.incarnation
            self.by_key[member.name] = self.by_key[member.id] = info
            self._retired.pop(member.id, None)
            self._ends.pop(member.name, None)
            self._ends.pop(member.id, None)
        return replaced or was_retired

    def retire(self, worker_id: int, reason: str = LEFT) -> None:
        """Remove a worker from the names that calls may use; keep its name for messages.

        Calls to the worker raise `WorkerLost` from now on.

        Args:
            worker_id: Id of the worker.
            reason: Why it is gone; by default it has left.
        """
        with self._lock:
            member = self._members.pop(worker_id, None)
            if member is not None:
                self.by_key.pop(member.name, None)
                self.by_key.pop(worker_id, None)
                self._retired[worker_id] = member.name
                self.losses.record(worker_id, member.incarnation, reason)
                end = WorkerInfo(member.name, worker_id), reason, member.incarnation
                self._ends[member.name] = self._ends[worker_id] = end
            while len(self._retired) > MAX_RETIRED:
                self._forget(next(iter(self._retired)))

    def _forget(self, worker_id: int) -> None:
        """Forget a worker that has left. Requires the lock."""
        name = self._retired.pop(worker_id)
        self._ends.pop(worker_id, None)
        end = self._ends.get(name)
        if end is not None and end[0].id == worker_id:  # no later worker of this name
            del self._ends[name]
        self._names.pop(worker_id, None)
        self._incarnations.pop(worker_id, None)
        self.losses.forget(worker_id)
        self.connected.pop(worker_id, None)
        self.lost.pop(worker_id, None)
        self.departed.discard(worker_id)
        self.removed.discard(worker_id)
        self.gone_at_shutdown.discard(worker_id)

    def get(self, worker_id: int) -> Member | None:
        """Return the record of another worker; None if it is not in the group."""
        return self._members.get(worker_id)

    def ids(self) -> set[int]:
        """Return the ids of the other workers."""
        with self._lock:
            return set(self._members)

    def infos(self) -> list[WorkerInfo]:
        """Return all workers of the group, ordered by id."""
        with self._lock:
            return sorted({id(info): info for info in self.by_key.values()}.values(), key=lambda info: info.id)

    def incarnation_of(self, worker_id: int) -> int:
        """Return the incarnation of a worker's newest known process; 0 if none."""
        return self._incarnations.get(worker_id, 0)

    def lost_incarnation(self, worker_id: int, why: str) -> int:
        """Return the incarnation of the process that a loss is about; 0: unknown.

        Args:
            worker_id: Id of the worker.
            why: Reason of its loss.
        """
        connected = self.connected.get(worker_id, 0)
        return self.losses.find(worker_id, why, connected, self.incarnation_of(worker_id))

    def last_lost(self, worker_id: int) -> int:
        """Return the incarnation of a worker's last ended process.

        Without one, return that of its newest known process.
        """
        return next(iter(self.losses.incarnations(worker_id)), self.incarnation_of(worker_id))

    def process_of(self, worker_id: int, ordinal: int) -> int:
        """Return the incarnation with a number, see `ordinal_of`; 0: unknown."""
        known = (self.incarnation_of(worker_id), *self.losses.incarnations(worker_id))
        return next((incarnation for incarnation in known if ordinal_of(incarnation) == ordinal), 0)

    def name_of(self, worker_id: int) -> str:
        """Return the name of a present or past worker, for messages."""
        return self._names.get(worker_id, f"(id {worker_id})")

    def resolve(self, to: object) -> WorkerInfo:
        """Return a worker by its name, id or info.

        Raises:
            ValueError: `to` is none of these.
            UnknownWorker: There is no such worker.
            WorkerLost: The worker died, or has left.
        """
        if isinstance(to, WorkerInfo):
            to = to.id
        if not isinstance(to, (str, int)):
            raise ValueError(f"Cannot get WorkerInfo from name {to}")
        info = self.by_key.get(to)
        if info is None:
            self._refresh()
            info = self.by_key.get(to)
        if info is None and to in self._ends:
            dead, reason, incarnation = self._ends[to]
            raise WorkerLost(dead.name, reason, incarnation)
        if info is None:
            raise UnknownWorker((self._info.name, self._info.id), to, tuple(i.name for i in self.infos()))
        return info

    def look_up(self, to: object = None) -> WorkerInfo:
        """Return a worker as `resolve` does, by default this one.

        Raises:
            NotAWorker: `to` is neither a name, an id nor an info.
            UnknownWorker: There is no such worker.
            WorkerLost: The worker died, or has left.
        """
        if to is None:
            return self._info
        if not isinstance(to, (str, int, WorkerInfo)):
            raise NotAWorker(f"Cannot get WorkerInfo from name {to}")
        return self.resolve(to)

    def resolve_any(self, to: object) -> WorkerInfo:
        """Return a worker as `resolve` does, also one that died or has left."""
        try:
            return self.resolve(to)
        except WorkerLost:
            key: Any = to.id if isinstance(to, WorkerInfo) else to
            end = self._ends.get(key)
            if end is None:  # it has just come back
                return self.resolve(to)
            return end[0]

    # ---- connections and losses

    def mark_connected(self, worker_id: int, incarnation: int) -> None:
        """Record that a connection to a worker is open."""
        self.connected[worker_id] = incarnation
        self._incarnations[worker_id] = max(incarnation, self.incarnation_of(worker_id))
        self.notify()

    def mark_lost(self, worker_id: int, incarnation: int, reason: str, departed: bool) -> bool:
        """Record that a worker is gone, unless `add` has added its new process.

        Args:
            worker_id: Id of the worker.
            incarnation: Incarnation of the worker; a newer one may be connected already.
            reason: Why it is gone.
            departed: It sent a goodbye, or left the group.

        Returns:
            False if there is a new process.
        """
        with self._lock:
            self.losses.record(worker_id, incarnation, reason)
            if self.connected.get(worker_id, 0) <= incarnation:
                self.connected.pop(worker_id, None)
            member = self._members.get(worker_id)
            if member is not None and incarnation < member.incarnation:
                return False
            if departed:
                self.departed.add(worker_id)
            self.lost[worker_id] = reason
        return True

    def mark_present(self, worker_id: int) -> None:
        """Record that a worker has reconnected, or that a new one has its id."""
        self.lost.pop(worker_id, None)
        self.departed.discard(worker_id)
        self.removed.discard(worker_id)

    def notify(self) -> None:
        """Call the listeners."""
        for listener in list(self.listeners):
            listener()

    @contextmanager
    def on_change(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call a listener in the block when a worker joins, connects, leaves or is lost.

        Args:
            listener: Must not block.
        """
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)

    def departed_names(self) -> set[str]:
        """Return the names of workers that sent a goodbye."""
        return self._names_of(self.departed)

    def lost_names(self) -> set[str]:
        """Return the names of workers that are gone."""
        return self._names_of(self.lost)

    def lost_processes(self) -> dict[str, int]:
        """Return the names of workers that are gone, and their incarnations.

        These are the newest ones that this worker has read in the log.
        """
        found = {}
        for peer in list(self.lost):
            member, name = self._members.get(peer), self.name_of(peer)
            if name in self._names_of([peer]):
                found[name] = self.incarnation_of(peer) if member is None else member.incarnation
        return found

    def _names_of(self, gone: Iterable[int]) -> set[str]:
        """Return the names of these ids, except names that another id has taken."""
        rows = [(self.name_of(peer), peer) for peer in list(gone)]
        return {name for name, peer in rows if getattr(self.by_key.get(name), "id", peer) == peer}
