"""Workers that are killed in a transfer, a creation, a shutdown or a join."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fault_helpers import LOST, check_clean, leave, loss, shut_down
from process_helpers import TIMEOUT, Actor, actors, call_many, failure, hang, join, state

from telegrad import rpc
from telegrad.group import rendezvous
from telegrad.testing import ResourceSnapshot, eventually, faults
from telegrad.testing.faults import Plan, Rule
from telegrad.worker.default_worker import current_worker

pytestmark = pytest.mark.slow

LARGE = 64 << 20  # bytes: more than sockets and rings hold
NAMES = ("w0", "w1", "w2")


@pytest.fixture(params=["shm", "tcp"])
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Actor]]:
    """Workers whose shared memory is too small for a large tensor."""
    options = {"transports": (request.param,), "shared_memory_bytes": LARGE // 4, "faults": str(Plan())}
    with actors(3, tmp_path, rpc_timeout=0, **options) as group:
        yield group


def kill(actor: Actor) -> float:
    """Kill a process; return the time."""
    assert actor.process.pid is not None
    os.kill(actor.process.pid, signal.SIGKILL)
    return time.monotonic()


# ---- steps


def stats() -> dict[str, int]:
    worker = current_worker()
    assert worker is not None
    return dict(worker.engine.stats())


def push(to: str) -> Any:
    return rpc.rpc_sync(to, len, (torch.ones(LARGE, dtype=torch.uint8),), timeout=0)


def pull(to: str) -> Any:
    return rpc.rpc_sync(to, make_large, timeout=0)


may_answer = threading.Event()


def make_large() -> torch.Tensor:
    state["asked"] = True
    assert may_answer.wait(TIMEOUT)
    return torch.ones(LARGE, dtype=torch.uint8)


def is_asked() -> bool:
    return "asked" in state


def answer() -> None:
    may_answer.set()


def measure() -> None:
    state["before"] = len(ResourceSnapshot.now().fds), psutil.Process().memory_info().rss


def has_released_everything() -> bool:
    """Return whether this process holds no more than before.

    Descriptors and memory are measured. The buffer pool keeps received memory for a while.
    """
    gc.collect()
    descriptors, memory = state["before"]
    now = stats()
    grown = psutil.Process().memory_info().rss - now["cached_bytes"] - memory
    return len(ResourceSnapshot.now().fds) <= descriptors and now["live_blocks"] == 0 and grown < LARGE // 2


def fetch_hanging(to: str) -> Any:
    state["made"] = rpc.remote(to, hang, timeout=0)
    return state.pop("made").to_here(timeout=0)


def is_serving() -> bool:
    return stats()["running_handlers"] > 0


# ---- transfers


def check_survivors(three: list[Actor], dead: int) -> None:
    survivors = [actor for actor in three if actor.rank != dead]
    for actor in survivors:
        eventually(lambda actor=actor: actor.do(has_released_everything), timeout=TIMEOUT, what=actor.name)  # type: ignore[misc]
    for actor, other in (survivors, reversed(survivors)):
        assert actor.do(call_many, other.name, 10) == 10
    check_clean(*survivors)
    shut_down(*survivors)


def connect_to_others(three: list[Actor], dead: int) -> None:
    """Measure the others when they are connected to each other only, then connect all."""
    survivors = [actor for actor in three if actor.rank != dead]
    for actor, other in (survivors, reversed(survivors)):
        assert actor.do(call_many, other.name, 2) == 2
    for actor in survivors:
        actor.do(measure)
        assert actor.do(call_many, three[dead].name, 2) == 2


def test_a_callee_is_killed_while_it_receives(three: list[Actor]) -> None:
    caller, callee, _ = three
    connect_to_others(three, dead=1)
    callee.stop()
    sent = caller.do(stats)["sent_messages"]
    waiting = caller.begin(loss, push, "w1")
    eventually(lambda: caller.do(stats)["sent_messages"] > sent)
    assert not waiting.is_over
    begun = kill(callee)
    assert waiting.result() == "WorkerLost"
    assert time.monotonic() - begun < LOST
    check_survivors(three, dead=1)


def test_a_callee_is_killed_while_it_sends(three: list[Actor]) -> None:
    """The caller has room for a part of the result only."""
    caller, callee, _ = three
    connect_to_others(three, dead=1)
    waiting = caller.begin(loss, pull, "w1")
    eventually(lambda: callee.do(is_asked))
    caller.stop()
    sent = callee.do(stats)["sent_messages"]
    callee.do(answer)
    eventually(lambda: callee.do(stats)["sent_messages"] > sent)
    kill(callee)
    begun = caller.resume()
    assert waiting.result() == "WorkerLost"
    assert time.monotonic() - begun < LOST
    check_survivors(three, dead=1)


def test_a_caller_is_killed_while_it_sends(three: list[Actor]) -> None:
    """The callee has half a request, which it drops."""
    caller, callee, _ = three
    connect_to_others(three, dead=0)
    callee.stop()
    sent = caller.do(stats)["sent_messages"]
    caller.begin(push, "w1")
    eventually(lambda: caller.do(stats)["sent_messages"] > sent)
    kill(caller)
    callee.resume()
    check_survivors(three, dead=0)


# ---- creations and shutdowns


def test_an_owner_is_killed_while_it_makes_a_value(three: list[Actor]) -> None:
    user, owner, other = three
    waiting = user.begin(loss, fetch_hanging, "w1")
    eventually(lambda: owner.do(is_serving))
    begun = kill(owner)
    assert waiting.result() in ("OwnerLost", "WorkerLost")
    assert time.monotonic() - begun < LOST
    check_clean(user, other)
    shut_down(user, other)


@pytest.mark.parametrize("victim", NAMES)
def test_any_worker_is_killed_in_a_graceful_shutdown(three: list[Actor], victim: str) -> None:
    """The leader, one in the middle or the last one."""
    for actor in three:
        for name in NAMES:
            assert actor.do(call_many, name, 2) == 2
    dying = three[NAMES.index(victim)]
    rest = [actor for actor in three if actor is not dying]
    dying.do(faults.add, Rule("delay", victim, "*", "shutdown"))
    leaving = {actor.name: actor.begin(leave) for actor in three}
    dying.do(faults.wait, 1)
    begun = kill(dying)
    for actor in rest:
        leaving[actor.name].result()
        assert actor.leave() == 0
    assert time.monotonic() - begun < LOST


# ---- joins


def die_in_the_join(after: bool) -> None:
    """Kill this process when it writes its record, or when it has written it."""

    def record(*arguments: Any) -> Any:
        if not after:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    def wait(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    original = rendezvous.record_of
    rendezvous.record_of = record
    rendezvous._wait_for_list = wait  # type: ignore[assignment]


@pytest.fixture
def unjoined(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, method="none") as group:
        yield group


def begin_to_join(group: list[Actor], where: str, timeout: float) -> Iterator[Any]:
    for actor in group:
        yield actor.begin(failure, join, actor.name, actor.rank, 3, where, {"rpc_timeout": timeout})


def test_a_worker_is_killed_before_its_record_is_written(unjoined: list[Actor], tmp_path: Path) -> None:
    """The others give up in time, and name it."""
    first, second, dying = unjoined
    dying.do(die_in_the_join, False)
    steps = list(begin_to_join(unjoined, f"file://{tmp_path}/store", 2.0))
    dying.process.join(TIMEOUT)
    assert dying.process.exitcode == -signal.SIGKILL
    for step in steps[:2]:
        kind, text = step.result()
        assert (kind, "rank 2 of 3 did not join" in text) == ("TelegradError", True), text
    assert first.leave() == second.leave() == 0


def test_a_worker_is_killed_after_its_record_is_written(unjoined: list[Actor], tmp_path: Path) -> None:
    """The others join, and the first call to it raises its loss."""
    first, second, dying = unjoined
    dying.do(die_in_the_join, True)
    dying.begin(failure, join, dying.name, dying.rank, 3, f"file://{tmp_path}/store", {})
    dying.process.join(TIMEOUT)
    assert dying.process.exitcode == -signal.SIGKILL
    for step in list(begin_to_join([first, second], f"file://{tmp_path}/store", TIMEOUT)):
        assert step.result() == ("", "None")
    assert first.do(call_many, "w1", 2) == second.do(call_many, "w0", 2) == 2
    for actor in (first, second):
        assert actor.do(loss, call_many, "w2", 1) == "WorkerLost"
    check_clean(first, second)
    shut_down(first, second)
