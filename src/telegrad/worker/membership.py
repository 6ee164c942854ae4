"""Joining and leaving a dynamic group, whose members come and go."""

import logging
import math
import secrets
import threading
from typing import Any

from telegrad.errors import WorkerLost
from telegrad.group import rendezvous
from telegrad.group.rendezvous import Group, Member, StoreGone
from telegrad.group.store_waits import BoundedStore, StoreUnresponsive
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
_IDS_PER_LIFE = 1 << 32  # of references: so many for each time a name has joined


def join_dynamic(
    store: Any,
    name: str,
    rank: int,
    group: Group,
    options: Options,
    store_at: str,
    layers: WorkerPlugins,
    timeout: float,
) -> Worker:
    """Joins; the members that are there know of it when this returns.

    Raises:
        RuntimeError: the name or the rank is taken.
    """
    with rendezvous.membership(store, name, joining=True):
        members = rendezvous.read_members(store, group)
        in_the_way = [member for member in members if name == member.name or rank == member.id]
        for dead in _dead_of(in_the_way, members, group, options, store_at, layers, timeout):
            members.remove(dead)
        view = rendezvous.check_members(members, None)
        if rank < 0:
            rank = view.free_id()
        # Refuses a name or a rank that is taken, before anything is made.
        view.join(protocol.Member(name, rank, process="the one that joins"))
        life = rendezvous.ordinal(store, name)
        worker = Worker(WorkerInfo(name, rank), group, options, store_at, life * _IDS_PER_LIFE, layers)
        worker.static = False
        worker.store = store
        try:
            for member in members:
                worker.add_member(member)
            worker.ready.set()
            tell = [worker.internal(member.id, _joined, tuple(worker.member), timeout) for member in members]
            for member, told in zip(members, tell, strict=True):
                try:
                    _await(told, name, member)
                except RuntimeError:  # it died without leaving: it has no place here any more
                    worker.remove_member(member.id, "it did not answer when a new worker joined")
            present = [member for member in members if member.id in worker.member_ids()]
            rendezvous.write_members(store, [*present, worker.member], group)
        except BaseException:
            worker.close()
            raise
    return worker


def _await(told: CallFuture[Any], name: str, member: Member) -> None:
    """Waits until a member has taken up a newcomer."""
    answered = threading.Event()
    told.add_done_callback(lambda _: answered.set())
    wait = Wait(name, math.inf)  # the call has a time-out
    while not wait_for(answered, wait.pause()):
        wait.step(lambda: (f"{member.name} (rank {member.id}) to take it up", "no answer"))
    told.wait()


def _dead_of(
    suspects: list[Member],
    members: list[Member],
    group: Group,
    options: Options,
    store_at: str,
    layers: WorkerPlugins,
    timeout: float,
) -> list[Member]:
    """Which of these members cannot be reached: they died without leaving, and another may have their place."""
    if not suspects:
        return []
    free = rendezvous.check_members(members, None).free_id()
    asker = Worker(WorkerInfo(f"asker-{secrets.token_hex(8)}", free), group, options, store_at, 0, layers)
    try:
        for member in suspects:
            asker.add_member(member)
        asker.ready.set()
        dead = []
        for member in suspects:
            try:
                asker.internal(member.id, _are_you_there, (), timeout).wait()
            except WorkerLost:
                dead.append(member)
            except RuntimeError:
                continue  # too busy to answer is not dead
        return dead
    finally:
        asker.close()


def _are_you_there() -> None:
    """Runs on a member whose name or rank another one wants."""


def leave_dynamic(worker: Worker, budget: SharedDeadline) -> None:
    """Has the others make no more calls to this worker, ends what is under way, and parts from them. Nobody joins or
    leaves meanwhile."""
    parted = False
    store = BoundedStore(worker.store, budget.left)
    try:
        with rendezvous.membership(store, worker.info.name, joining=False, budget=budget):
            members = [m for m in rendezvous.read_members(store, worker.group) if m.id != worker.info.id]
            rendezvous.write_members(store, members, worker.group)
            _announce(worker, {m.id for m in members}, budget)
            parted = True
    except StoreGone as e:
        logger.warning(
            "worker %s leaves its group without the store, whose host %s: %s. Nobody can join any more.",
            worker.info.name,
            "is silent" if isinstance(e, StoreUnresponsive) else "has gone",
            str(e).partition("\n")[0],
        )
        if not parted:
            _announce(worker, worker.member_ids(), budget)


def _announce(worker: Worker, members: set[int], budget: SharedDeadline) -> None:
    _tell(worker, members, _leaving, budget.left())
    worker.drain(budget.left())
    _tell(worker, members, _left, budget.left())


def _tell(worker: Worker, members: set[int], what: Any, timeout: float) -> None:
    present = sorted(members & worker.member_ids())
    for told in [worker.internal(member, what, (worker.info.id,), timeout) for member in present]:
        try:
            told.wait()
        except RuntimeError:
            continue  # it is gone itself, or has parted from this worker before it could answer


def _joined(*facts: Any) -> None:
    """Runs on the members that are there."""
    scope = current.get()
    assert scope is not None
    scope.worker.add_member(Member(*facts))


def _leaving(worker_id: int) -> None:
    """Runs on the members that stay."""
    scope = current.get()
    assert scope is not None
    scope.worker.retire_member(worker_id)


def _left(worker_id: int) -> None:
    """Runs on the members that stay."""
    scope = current.get()
    assert scope is not None
    scope.worker.remove_member(worker_id, "it left the group")
