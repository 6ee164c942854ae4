"""Join and leave a dynamic group, in which workers come and go."""

import logging
import math
import secrets
import threading

from telegrad.errors import WorkerLost
from telegrad.group import rendezvous
from telegrad.group.rendezvous import Group, Member, StoreGone
from telegrad.group.store_waits import BoundedStore, Store, StoreUnresponsive
from telegrad.options import Options
from telegrad.protocols import membership as protocol
from telegrad.timeouts import SharedDeadline
from telegrad.types import WorkerInfo
from telegrad.waits import Wait, wait_for
from telegrad.worker.autograd_hooks import WorkerPlugins
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.scope import current
from telegrad.worker.worker import Worker

__all__ = ["join_dynamic", "leave_dynamic"]

logger: logging.Logger = logging.getLogger("telegrad")
_IDS_PER_LIFE = 1 << 32  # ids of references per incarnation of a name


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
    """Join a dynamic group; all present members know the new worker on return.

    Args:
        store: Store of the group.
        name: Name of the new worker.
        rank: Id of the new worker; negative for any free id.
        group: Token and secret of the group.
        options: Options of the worker.
        store_at: Host of the store.
        plugins: Plugins of the worker.
        timeout: Limit in seconds for each member's reply.

    Raises:
        RuntimeError: Another member has the name or the rank.
    """
    with rendezvous.membership_lock(store, name, joining=True):
        members = rendezvous.read_members(store, group)
        conflicting = [member for member in members if name == member.name or rank == member.id]
        for dead in _dead_of(conflicting, members, group, options, store_at, plugins, timeout):
            members.remove(dead)
        view = rendezvous.check_members(members, None)
        if rank < 0:
            rank = view.free_id()
        # Raise for a taken name or rank before creating the worker.
        view.join(protocol.Member(name, rank, process="the joining worker"))
        life = rendezvous.ordinal(store, name)
        worker = Worker(WorkerInfo(name, rank), group, options, store_at, life * _IDS_PER_LIFE, plugins)
        worker.static = False
        worker.store = store
        try:
            for member in members:
                worker.add_member(member)
            worker.ready.set()
            notifications = [
                worker.start_internal(member.id, _joined, tuple(worker.member), timeout) for member in members
            ]
            for member, notified in zip(members, notifications, strict=True):
                try:
                    _await(notified, name, member)
                except RuntimeError:  # the member died without leaving
                    worker.remove_member(member.id, "no reply when a new worker joined")
            present = [member for member in members if member.id in worker.members.ids()]
            rendezvous.write_members(store, [*present, worker.member], group)
        except BaseException:
            worker.close()
            raise
    return worker


def _await(notified: CallFuture[object], name: str, member: Member) -> None:
    """Wait until a member has added the new worker."""
    answered = threading.Event()
    notified.add_done_callback(lambda _: answered.set())
    wait = Wait(name, math.inf)  # the call has a timeout
    while not wait_for(answered, wait.pause()):
        wait.step(lambda: (f"{member.name} (rank {member.id}) to add it", "no reply"))
    notified.wait()


def _dead_of(
    suspects: list[Member],
    members: list[Member],
    group: Group,
    options: Options,
    store_at: str,
    plugins: WorkerPlugins,
    timeout: float,
) -> list[Member]:
    """Return the suspects that do not reply.

    They died without leaving, so their names and ranks are free.
    """
    if not suspects:
        return []
    free = rendezvous.check_members(members, None).free_id()
    prober = Worker(WorkerInfo(f"prober-{secrets.token_hex(8)}", free), group, options, store_at, 0, plugins)
    try:
        for member in suspects:
            prober.add_member(member)
        prober.ready.set()
        dead = []
        for member in suspects:
            try:
                prober.start_internal(member.id, _ping, (), timeout).wait()
            except WorkerLost:
                dead.append(member)
            except RuntimeError:
                continue  # a busy member is alive
        return dead
    finally:
        prober.close()


def _ping() -> None:
    """Do nothing; a joining worker checks with it whether this member is alive."""


def leave_dynamic(worker: Worker, budget: SharedDeadline) -> None:
    """Leave the group: stop calls to this worker, end pending work, disconnect.

    Holds the membership lock, so that no other worker joins or leaves in the meantime.
    """
    announced = False
    store = BoundedStore(worker.store, budget.left)
    try:
        with rendezvous.membership_lock(store, worker.info.name, joining=False, budget=budget):
            members = [m for m in rendezvous.read_members(store, worker.group) if m.id != worker.info.id]
            rendezvous.write_members(store, members, worker.group)
            _announce(worker, {m.id for m in members}, budget)
            announced = True
    except StoreGone as e:
        logger.warning(
            "worker %s leaves its group without the store; its host %s: %s. No worker can join any more.",
            worker.info.name,
            "does not reply" if isinstance(e, StoreUnresponsive) else "has gone",
            str(e).partition("\n")[0],
        )
        if not announced:
            _announce(worker, worker.members.ids(), budget)


def _announce(worker: Worker, members: set[int], budget: SharedDeadline) -> None:
    _notify(worker, members, _leaving, budget.left())
    worker.shutdown.drain(budget.left())
    _notify(worker, members, _left, budget.left())


def _notify(worker: Worker, members: set[int], function: object, timeout: float) -> None:
    present = sorted(members & worker.members.ids())
    for notified in [worker.start_internal(member, function, (worker.info.id,), timeout) for member in present]:
        try:
            _wait(notified)
        except RuntimeError:
            continue  # that member is gone, or disconnected before its reply


def _wait(future: CallFuture[object]) -> None:
    """Wait for a future, also in an event loop's thread.

    A coroutine may shut down its worker.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    wait_for(done)
    future.wait()


def _joined(*facts: object) -> None:
    """Add the new worker on a present member."""
    scope = current.get()
    assert scope is not None
    scope.worker.add_member(Member._make(facts))


def _leaving(worker_id: int) -> None:
    """Retire the leaving worker on a remaining member."""
    scope = current.get()
    assert scope is not None
    scope.worker.members.retire(worker_id)


def _left(worker_id: int) -> None:
    """Remove the worker that left on a remaining member."""
    scope = current.get()
    assert scope is not None
    scope.worker.remove_member(worker_id, "it left the group")
