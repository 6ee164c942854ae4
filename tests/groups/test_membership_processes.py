"""Members that are killed or stopped at any step do not block joins and leaves."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from free_ports import free_port
from process_helpers import TIMEOUT, Actor, actors, call, call_many, failure, failures_of_calls, state

from telegrad import rpc
from telegrad.errors import WorkerLost
from telegrad.group.lease import Lease
from telegrad.group.log import GroupLog
from telegrad.rpc import Options
from telegrad.testing import eventually
from telegrad.worker.membership import joining
from telegrad.worker.membership.service import MembershipService
from telegrad.worker.membership.shutdown_barrier import GracefulShutdown

LEASE = 2.0  # s
SOON = 2.0  # s; a join takes less, also next to a stopped member

# ---- steps


def host_store(port: int) -> None:
    state["host"] = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def options(where: str, **more: Any) -> Options:
    return Options(init_method=where, rpc_timeout=TIMEOUT, member_lease=LEASE, local_heartbeat=LEASE / 4, **more)


pytestmark = pytest.mark.openssl  # its groups have secrets


def join(name: str, where: str, secret: str | None = None) -> float:
    """Join a dynamic group and return the duration."""
    begun = time.monotonic()
    rpc.init_rpc(name, rpc_backend_options=options(where, secret=secret))
    return time.monotonic() - begun


def join_static(name: str, rank: int, size: int, where: str, secret: str | None = "secret of the group") -> float:
    begun = time.monotonic()
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options(where, secret=secret))
    return time.monotonic() - begun


def leave() -> None:
    rpc.shutdown(timeout=TIMEOUT)


def names() -> list[str]:
    return [info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos()]


def incarnation() -> int:
    return int(rpc.api._get_current_rpc_agent().worker.incarnation)


def process_of(worker: str) -> int:
    return int(rpc.rpc_sync(worker, os.getpid, timeout=TIMEOUT))


def reaches(worker: str, process: int | None) -> bool:
    """Return whether a call gets to a process, instead of failing with the one before."""
    try:
        return process_of(worker) == process
    except WorkerLost:
        return False


STEPS: dict[str, tuple[Any, str, bool]] = {  # function, whether the process dies after it has run
    "before the lease": (Lease, "acquire", False),
    "after the lease": (Lease, "acquire", True),
    "before the entry": (GroupLog, "append", False),
    "after the entry": (GroupLog, "append", True),
    "before it serves": (joining, "serve", False),
    "after it serves": (MembershipService, "begin", True),
    "before it leaves": (MembershipService, "leave", False),
    "after its entry": (MembershipService, "announce", False),
    "in its drain": (GracefulShutdown, "drain", False),
    "after its drain": (GracefulShutdown, "drain", True),
}


def die_at(step: str, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Kill or stop this process when it comes to a step."""
    owner, name, afterwards = STEPS[step]
    original = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        result = original(*args, **kwargs) if afterwards else None
        os.kill(os.getpid(), with_signal)  # a stopped process goes on here
        return result if afterwards else original(*args, **kwargs)

    setattr(owner, name, run)


def assert_reached(actor: Actor, name: str, caller: Actor) -> None:
    """Assert that calls get to a new process.

    A join waits only briefly for the other members to read of it, so calls of a late one may still fail.
    """
    eventually(lambda: caller.do(reaches, name, actor.process.pid), timeout=TIMEOUT)


@pytest.fixture
def where(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a store that no member hosts."""
    with actors(1, tmp_path / "host" if (tmp_path / "host").mkdir() is None else tmp_path, method="none") as (host,):
        port = free_port()
        host.do(host_store, port)
        yield f"tcp://127.0.0.1:{port}"


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(4, tmp_path, method="none") as group:
        yield group


def is_settled(actor: Actor, expected: list[str]) -> Callable[[], bool]:
    return lambda: sorted(actor.do(names)) == expected


JOINING = [step for step in STEPS if "leaves" not in step and "its entry" not in step and "drain" not in step]


@pytest.mark.parametrize("step", JOINING)
def test_newcomer_is_killed(four: list[Actor], where: str, step: str) -> None:
    first, dying, second, third = four
    first.do(join, first.name, where)
    dying.do(die_at, step)
    dying.begin(join, dying.name, where)
    dying.process.join(TIMEOUT)
    assert dying.process.exitcode == -signal.SIGKILL
    assert second.do(join, second.name, where) < LEASE
    assert third.do(join, dying.name, where) < LEASE, "its name is free at once: the kernel has reported its end"
    eventually(is_settled(first, ["w0", "w1", "w2"]))
    for actor in (first, second, third):
        for name in ("w0", "w1", "w2"):
            assert actor.do(call_many, name, 2) == 2
    for actor in (second, third, first):
        actor.do(leave)


@pytest.mark.parametrize("step", [step for step in STEPS if step not in JOINING])
def test_leaver_is_killed(four: list[Actor], where: str, step: str) -> None:
    first, dying, second, third = four
    for actor in (first, dying, second):
        actor.do(join, actor.name, where)
    assert dying.do(call_many, "w0", 2) == 2
    dying.do(die_at, step)
    dying.begin(leave)
    dying.process.join(TIMEOUT)
    assert dying.process.exitcode == -signal.SIGKILL
    assert third.do(join, third.name, where) < LEASE
    for actor in (first, second, third):
        eventually(is_settled(actor, ["w0", "w2", "w3"]))
        assert actor.do(call_many, "w3", 2) == 2
        actor_sees, text = actor.do(failure, call, "w1", abs, -1)
        assert actor_sees in ("UnknownWorker", "WorkerLost"), text
    for actor in (second, third, first):
        actor.do(leave)


def test_stopped_member_does_not_delay_a_newcomer(four: list[Actor], where: str) -> None:
    """The group loses it when its lease expires; then its process closes the worker."""
    first, stopped, second, third = four
    for actor in (first, stopped):
        actor.do(join, actor.name, where)
    stopped.stop()
    assert second.do(join, second.name, where) < SOON
    assert second.do(names) == ["w0", "w1", "w2"]
    eventually(is_settled(first, ["w0", "w2"]), timeout=TIMEOUT)
    assert third.do(join, third.name, where) < SOON
    kind, text = first.do(failure, call, "w1", abs, -1)
    assert kind == "WorkerLost"
    assert "it has not renewed its lease for" in text
    stopped.resume()
    eventually(lambda: "worker w1 is out of its group: it has not renewed its lease" in stopped.stderr())
    eventually(lambda: "out of its group" in stopped.do(failure, call, "w0", abs, -1)[1])
    for actor in (second, third, first):
        actor.do(leave)


def test_replaced_process_gets_no_calls(four: list[Actor], where: str) -> None:
    """A process that took the name of a stopped one gets its calls from then on."""
    first, zombie, successor, _ = four
    for actor in (first, zombie):
        actor.do(join, actor.name, where)
    old_pid, old = first.do(process_of, "w1"), zombie.do(incarnation)
    zombie.stop()
    assert successor.do(join, "w1", where) >= LEASE / 2  # after the lease has expired
    assert successor.do(incarnation) > old
    assert_reached(successor, "w1", first)
    new_pid = first.do(process_of, "w1")
    assert old_pid != new_pid == successor.process.pid
    zombie.resume()
    eventually(lambda: "worker w1 is out of its group" in zombie.stderr())
    assert first.do(process_of, "w1") == new_pid
    assert successor.do(process_of, "w0") == first.process.pid
    for actor in (successor, first):
        actor.do(leave)


def record(number: int) -> None:
    state.setdefault("recorded", []).append(number)


def recorded() -> list[int]:
    return list(state.get("recorded", ()))


def begin_to_record(to: str, count: int) -> None:
    state["calls"] = [rpc.rpc_async(to, record, (number,), timeout=0) for number in range(count)]


def test_calls_to_a_killed_process_never_reach_its_successor(four: list[Actor], where: str) -> None:
    """The calls are under way when it dies, and its references end with it."""
    first, old, successor, _ = four
    for actor in (first, old):
        actor.do(join, actor.name, where)
    first.do(hold_reference, "w1")
    old.stop()
    first.do(begin_to_record, "w1", 500)
    old.end()
    assert successor.do(join, "w1", where) < SOON
    assert_reached(successor, "w1", first)
    assert [kind for kind, _ in first.do(failures_of_calls)[1]] == ["WorkerLost"] * 500
    assert successor.do(recorded) == []
    assert first.do(failure, use_reference)[0] == "OwnerLost"
    first.do(hold_reference, "w1")
    assert first.do(use_reference) == {}
    first.do(drop_reference)
    for actor in (successor, first):
        actor.do(leave)
        assert actor.leave() == 0


# ---- static groups


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting"


def join_all(group: list[Actor], file: str, secret: str | None = "secret of the group") -> None:
    steps = [actor.begin(join_static, actor.name, actor.rank, len(group), file, secret) for actor in group]
    for step in steps:
        step.result()


def shut_down_all(group: list[Actor]) -> None:
    for step in [actor.begin(leave) for actor in group]:
        step.result()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rank_of_a_static_group_comes_back(four: list[Actor], file: str, rank: int) -> None:
    *group, spare = four
    join_all(group, file)
    for actor in group:
        for other in group:
            assert actor.do(call_many, other.name, 2) == 2
    old = group[rank].do(incarnation)
    group[rank].end()
    spare.name = group[rank].name
    assert spare.do(join_static, spare.name, rank, 3, file) < SOON
    group[rank] = spare
    assert spare.do(incarnation) > old
    for actor in group:
        for other in group:
            assert_reached(other, other.name, actor)
    assert [actor.do(names) for actor in group] == [["w0", "w1", "w2"]] * 3
    shut_down_all(group)


def hold_reference(to: str) -> None:
    state["rref"] = rpc.remote(to, dict)
    state["rref"].to_here(timeout=TIMEOUT)


def drop_reference() -> None:
    del state["rref"]


def owned() -> int:
    return len(rpc.api._get_current_rpc_agent().worker.references.leaks())


def test_references_of_a_process_that_is_replaced(four: list[Actor], file: str) -> None:
    """The owner releases what the old process held; the new one creates values."""
    first, old, new, _ = four
    join_all([first, old], file)
    old.do(hold_reference, "w0")
    assert first.do(owned) == 1
    old.end()
    new.do(join_static, "w1", 1, 2, file)
    eventually(lambda: first.do(owned) == 0)
    new.do(hold_reference, "w0")
    first.do(hold_reference, "w1")
    assert (first.do(owned), new.do(owned)) == (1, 1)
    for actor in (first, new):
        actor.do(drop_reference)
    shut_down_all([first, new])


@pytest.mark.parametrize(
    ("name", "said"), [("w1", "rank 1 is taken by worker w1"), ("x", "Rank 1 is taken twice: by workers w1 and x")]
)
def test_rank_of_a_live_process_is_taken(four: list[Actor], file: str, name: str, said: str) -> None:
    *group, spare = four
    join_all(group, file)
    kind, text = spare.do(failure, join_static, name, 1, 3, file)
    assert (kind, said in text) == ("JoinRefused", True), text
    assert group[0].do(process_of, "w1") == group[1].process.pid
    shut_down_all(group)


def test_static_group_without_a_given_secret(four: list[Actor], file: str) -> None:
    """Its secret is no longer in the store, so no process can come back."""
    *group, spare = four
    join_all(group, file, None)
    group[1].end()
    kind, text = spare.do(failure, join_static, "w1", 1, 3, file, None)
    assert kind == "TelegradError"
    assert "Give the group a secret (TELEGRAD_SECRET) before it starts" in text
    shut_down_all([group[0], group[2]])


def leave_at_once() -> None:
    rpc.shutdown(graceful=False)


def absent() -> tuple[int, ...]:
    """Return the ranks that the shutdown of this worker, its leader, waits for."""
    return rpc.api._get_current_rpc_agent().worker.shutdown._stages[0]._machine.missing()


@pytest.mark.parametrize("goodbye", [False, True], ids=["killed", "after a goodbye"])
def test_shutdown_waits_for_a_rank_that_comes_back(four: list[Actor], file: str, goodbye: bool) -> None:
    """A server that waits in its shutdown serves the new process."""
    server, old, trainer, new = four
    join_all([server, old, trainer], file)
    assert old.do(call_many, "w0", 2) == 2
    ending = server.begin(leave)
    if goodbye:
        old.do(leave_at_once)
    old.end()
    assert new.do(join_static, "w1", 1, 3, file) < SOON
    assert new.do(process_of, "w0") == server.process.pid
    last = trainer.begin(leave)
    eventually(lambda: new.do(call, "w0", absent) == (1,), timeout=TIMEOUT)
    assert new.do(call_many, "w0", 2) == 2
    assert not ending.is_over
    new.do(leave)
    ending.result()
    last.result()


# ---- replaced processes


def blind() -> None:
    """Let this process hear nothing from the store, once no renewal is under way."""
    renewed = threading.Event()

    def renew(_: Lease) -> bool:
        renewed.set()
        return True

    Lease.renew = renew  # type: ignore[method-assign]
    MembershipService._apply_to_self = lambda *_: None  # type: ignore[method-assign]
    assert renewed.wait(TIMEOUT)


def use_reference() -> object:
    return state["rref"].to_here(timeout=TIMEOUT)


def assert_fenced(zombie: Actor, why: str) -> None:
    """Assert that all uses of a replaced worker fail with the reason.

    The first call may only find that its connection was closed; the next one connects, and is refused.
    """
    eventually(lambda: zombie.do(failure, call, "w0", abs, -1)[0] == "NotInitialized", timeout=TIMEOUT)
    eventually(lambda: f"worker {zombie.name} is out of its group: {why}" in zombie.stderr(), timeout=TIMEOUT)
    kind, text = zombie.do(failure, call, "w0", abs, -1)
    assert (kind, f"is out of its group: {why}" in text) == ("NotInitialized", True), text
    assert zombie.do(failure, use_reference)[0] in ("NotInitialized", "RRefDeleted")


def test_peers_fence_a_replaced_process_that_hears_nothing_from_the_store(four: list[Actor], where: str) -> None:
    first, zombie, successor, _ = four
    for actor in (first, zombie):
        actor.do(join, actor.name, where)
    zombie.do(hold_reference, "w0")
    zombie.do(blind)
    zombie.stop()
    successor.do(join, "w1", where)
    assert_reached(successor, "w1", first)
    zombie.resume()
    assert_fenced(zombie, "another process has taken its name, as worker w0 reports")
    assert first.do(process_of, "w1") == successor.process.pid
    assert successor.do(process_of, "w0") == first.process.pid
    for actor in (successor, first):
        actor.do(leave)


@pytest.mark.parametrize("is_blind", [False, True], ids=["by the store", "by a peer"])
def test_replaced_rank_of_a_static_group_is_fenced(four: list[Actor], file: str, is_blind: bool) -> None:
    first, zombie, successor, _ = four
    join_all([first, zombie], file)
    zombie.do(hold_reference, "w0")
    if is_blind:
        zombie.do(blind)
    zombie.stop()
    successor.do(join_static, "w1", 1, 2, file)
    assert_reached(successor, "w1", first)
    zombie.resume()
    zombie.do(failure, call, "w0", abs, -1)
    assert_fenced(zombie, "another process has taken its name, as worker w0 reports" if is_blind else "")
    assert first.do(process_of, "w1") == successor.process.pid
    shut_down_all([first, successor])
