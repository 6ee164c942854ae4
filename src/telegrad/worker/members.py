"""Members of a worker's group, and the workers that have left it."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from telegrad.errors import UnknownWorker
from telegrad.group.rendezvous import Member
from telegrad.types import WorkerInfo

__all__ = ["Members"]


class Members:
    """Table of the workers that one worker knows.

    Args:
        info: Name and id of this worker.
        refresh: Adds recent members of a dynamic group; called for an unknown name or id.
    """

    def __init__(self, info: WorkerInfo, refresh: Callable[[], None]) -> None:
        self.by_key: dict[str | int, WorkerInfo] = {info.name: info, info.id: info}  # never replaced: the core holds it
        self.lost: dict[int, str] = {}  # workers that are gone, and the reason
        self.connected: dict[int, str] = {}  # first connection: name, "to" or "from", and the address
        self.departed: set[int] = set()  # lost workers that sent a goodbye
        self.gone_at_shutdown: set[int] = set()  # lost workers by agreement of the group when its shutdown began
        self.loss_listeners: list[Callable[[], object]] = []
        self._info = info
        self._refresh = refresh
        self._members: dict[int, Member] = {}
        self._retired: set[int] = set()  # ids of workers that have left the group
        self._names: dict[int, str] = {info.id: info.name}  # also of retired ids, for messages
        self._lock = threading.Lock()

    # ---- membership

    def add(self, member: Member) -> tuple[bool, bool]:
        """Add a member, or replace the previous one with the same id.

        Returns:
            Whether another incarnation had the id, and whether the id was in the group before.
        """
        info = WorkerInfo(member.name, member.id)
        with self._lock:
            known = self._members.get(member.id)
            self._members[member.id] = member
            self._names[member.id] = member.name
            self.by_key[member.name] = self.by_key[member.id] = info
            was_retired = member.id in self._retired
            self._retired.discard(member.id)
        replaced = known is not None and known.incarnation != member.incarnation
        return replaced, replaced or was_retired

    def retire(self, worker_id: int) -> None:
        """Remove a worker from the names that calls may use; keep its name for messages."""
        with self._lock:
            member = self._members.pop(worker_id, None)
            if member is not None:
                self.by_key.pop(member.name, None)
                self.by_key.pop(worker_id, None)
                self._retired.add(worker_id)

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

    def name_of(self, worker_id: int) -> str:
        """Return the name of a present or past worker, for messages."""
        return self._names.get(worker_id, f"(id {worker_id})")

    def resolve(self, to: object) -> WorkerInfo:
        """Return a worker by its name, id or info.

        Raises:
            ValueError: `to` is none of these.
            UnknownWorker: There is no such worker.
        """
        if isinstance(to, WorkerInfo):
            to = to.id
        if not isinstance(to, (str, int)):
            raise ValueError(f"Cannot get WorkerInfo from name {to}")
        info = self.by_key.get(to)
        if info is None:
            self._refresh()
            info = self.by_key.get(to)
        if info is None:
            raise UnknownWorker((self._info.name, self._info.id), to, tuple(i.name for i in self.infos()))
        return info

    # ---- losses

    def mark_lost(self, worker_id: int, reason: str, departed: bool) -> None:
        """Record that a worker is gone.

        Args:
            worker_id: Id of the worker.
            reason: Why it is gone.
            departed: It sent a goodbye, or left the group.
        """
        if departed:
            self.departed.add(worker_id)
        self.lost[worker_id] = reason
        self.connected.pop(worker_id, None)

    def mark_present(self, worker_id: int) -> None:
        """Record that a worker has reconnected, or that a new one has its id."""
        self.lost.pop(worker_id, None)
        self.departed.discard(worker_id)

    def notify_loss(self) -> None:
        """Call the loss listeners."""
        for listener in list(self.loss_listeners):
            listener()

    @contextmanager
    def on_loss(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call a listener in the block when a worker is lost or leaves.

        Args:
            listener: Must not block.
        """
        self.loss_listeners.append(listener)
        try:
            yield
        finally:
            self.loss_listeners.remove(listener)

    def departed_names(self) -> set[str]:
        """Return the names of workers that sent a goodbye."""
        return self._names_of(self.departed)

    def lost_names(self) -> set[str]:
        """Return the names of workers that are gone."""
        return self._names_of(self.lost)

    def _names_of(self, gone: Iterable[int]) -> set[str]:
        """Return the names of these ids, except names that another id has taken."""
        rows = [(self.name_of(peer), peer) for peer in list(gone)]
        return {name for name, peer in rows if getattr(self.by_key.get(name), "id", peer) == peer}
