"""Killed and exiting workers: peers notice at once and continue."""

import os
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from process_helpers import (
    TIMEOUT,
    Actor,
    actors,
    begin_calls,
    call,
    call_many,
    failure,
    failures_of_calls,
    hang,
    shut_all_down,
    shut_down,
    state,
)

from telegrad import rpc
from telegrad.rpc import RRef
from telegrad.testing import eventually

AT_ONCE = 3.0  # s, on a busy machine; it takes milliseconds
CALLS = 5


class Tracked:
    """Value that records its deletion."""

    ended = 0

    def __init__(self) -> None:
        weakref.finalize(self, _note_end)

    def answer(self) -> int:
        return 42


def _note_end() -> None:
    Tracked.ended += 1


# ---- steps


def make_reference(name: str, owner: str) -> None:
    state[name] = rpc.remote(owner, Tracked)
    assert state[name].rpc_sync(timeout=TIMEOUT).answer() == 42


def make_with(name: str, owner: str) -> None:
    rpc.remote(owner, keep, ("copy", state[name]))


def give(name: str, to: str) -> None:
    """Send a reference to another worker, which keeps it."""
    rpc.rpc_sync(to, keep, (name, state[name]), timeout=TIMEOUT)


def keep(name: str, rref: Any) -> None:
    state[name] = rref


def forget(name: str) -> None:
    del state[name]


def use(name: str) -> int:
    return int(state[name].rpc_sync(timeout=TIMEOUT).answer())


def wait_for_end_of(count: int) -> None:
    eventually(lambda: Tracked.ended >= count, TIMEOUT)


def hold_own(name: str) -> None:
    state[name] = RRef(Tracked())


def fetch(name: str) -> Any:
    return state[name].to_here(timeout=TIMEOUT)


# ---- kill -9


@pytest.fixture
def four(tmp_path: Path) -> Any:
    with actors(4, tmp_path) as group:
        yield group


def kill(victim: Actor) -> float:
    """Kill a worker; return the time of its death."""
    before = time.monotonic()
    victim.end()
    return before


def test_all_calls_to_a_killed_worker_fail_at_once(four: list[Actor]) -> None:
    for actor in four[:3]:
        actor.do(begin_calls, "w3", hang, CALLS)
    others = four[0].begin(call_many, "w1", 500)
    killed = kill(four[3])
    for actor in four[:3]:
        when, failures = actor.do(failures_of_calls)
        assert when - killed < AT_ONCE
        assert len(failures) == CALLS
        for kind, text in failures:
            assert kind == "WorkerLost"
            assert text.startswith(
                "worker w3 is lost: the connection was closed without a goodbye: its process died or was killed"
            )
    assert others.result() == 500
    for a, b in ((0, 1), (1, 2), (2, 0)):
        assert four[a].do(call_many, f"w{b}", 10) == 10
    assert four[0].do(failure, call, "w3", abs, -1)[0] == "WorkerLost", "later calls fail too"
    assert max(shut_all_down(four[:3])) < AT_ONCE


def test_references_of_a_killed_worker(four: list[Actor]) -> None:
    four[0].do(make_reference, "of w1", "w1")
    four[0].do(give, "of w1", "w3")
    four[0].do(forget, "of w1")
    four[0].do(make_reference, "of w3", "w3")
    four[0].do(give, "of w3", "w2")
    four[2].do(hold_own, "of w2")
    four[2].do(give, "of w2", "w3")
    four[2].do(forget, "of w2")
    assert four[1].do(_ended) == four[2].do(_ended) == 0
    kill(four[3])
    four[1].do(wait_for_end_of, 1)  # only the dead one had a reference to it
    four[2].do(wait_for_end_of, 1)
    for actor in (four[0], four[2]):
        for step in (use, fetch):
            kind, text = actor.do(failure, step, "of w3")
            assert kind in ("OwnerLost", "WorkerLost"), text
            assert "w3" in text
    eventually(lambda: four[0].do(failure, give, "of w3", "w1")[0] == "OwnerLost")
    kind, text = four[0].do(failure, use, "of w3")
    assert kind == "OwnerLost"
    assert "was lost with its owner, worker w3" in text
    for owner in ("w0", "w1"):  # these are not lost: no worker waits for messages that could not be sent to them
        assert four[0].do(failure, make_with, "of w3", owner)[0] == "OwnerLost"
    assert max(shut_all_down(four[:3])) < AT_ONCE


def _ended() -> int:
    return Tracked.ended


@pytest.mark.parametrize("names", ["w{}", "reversed"])
def test_death_seen_by_one_worker(tmp_path: Path, names: str) -> None:
    """Only the first is connected to it; the others are notified at shutdown."""
    with actors(4, tmp_path, names="w{}") if names == "w{}" else _reversed(tmp_path) as group:
        victim = group[3]
        assert group[0].do(call_many, victim.name, 3) == 3
        kill(victim)
        eventually(lambda: group[0].do(failure, call, victim.name, abs, -1)[0] == "WorkerLost")
        assert max(shut_all_down(group[:3])) < AT_ONCE
        line = "worker {} is lost to {}: others noticed"
        told = [line.format(victim.name, actor.name) in actor.stderr() for actor in group]
        assert told == [False, True, True, False]


def _reversed(folder: Path) -> Any:
    """Reverse the names, so that torch's gather leader has not the lowest rank."""
    import string

    names = type("Names", (str,), {"format": lambda _, rank: string.ascii_lowercase[10 - rank]})
    return actors(4, folder, names=names())


def test_death_seen_by_no_worker(four: list[Actor]) -> None:
    """No worker was ever connected to it."""
    kill(four[3])
    assert four[0].do(call_many, "w1", 3) == 3
    assert max(shut_all_down(four[:3])) < AT_ONCE


def test_death_while_the_others_shut_down(four: list[Actor]) -> None:
    steps = [actor.begin(shut_down) for actor in four[:3]]
    kill(four[3])
    assert max(step.result() for step in steps) < AT_ONCE + 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_death_of_the_stores_host(tmp_path: Path, how: signal.Signals) -> None:
    with actors(3, tmp_path, method="tcp") as group:
        for actor in group[1:]:
            actor.do(begin_calls, "w0", hang, 1)
        group[0].end(how)
        for actor in group[1:]:
            ((kind, text),) = actor.do(failures_of_calls)[1]
            assert (kind, "worker w0 is lost" in text) == ("WorkerLost", True)
        assert group[1].do(call_many, "w2", 10) == 10
        assert max(shut_all_down(group[1:])) < AT_ONCE


def test_a_stopped_process_is_not_lost(four: list[Actor]) -> None:
    """The process may resume, so calls to it wait until their timeouts."""
    four[0].do(call_many, "w3", 1)
    four[3].stop()
    step = four[0].begin(call_many, "w3", 1)
    assert four[0].do(call_many, "w1", 10) == 10
    four[3].resume()
    assert step.result() == 1


def test_several_die_at_once(four: list[Actor]) -> None:
    for victim in ("w1", "w2", "w3"):
        four[0].do(call_many, victim, 1)
    four[0].do(begin_calls, "w2", hang, CALLS)
    for victim in four[1:]:
        kill(victim)
    assert [kind for kind, _ in four[0].do(failures_of_calls)[1]] == ["WorkerLost"] * CALLS
    assert four[0].do(shut_down) < AT_ONCE


# ---- other exits


def exit_now(code: int) -> None:
    os._exit(code)


def raise_system_exit() -> None:
    sys.exit(5)


def test_process_that_exits_in_a_handler(four: list[Actor]) -> None:
    kind, text = four[0].do(failure, call, "w3", exit_now, 3)
    assert kind == "WorkerLost"
    assert "w3" in text
    assert max(shut_all_down(four[:3])) < AT_ONCE


def test_sys_exit_in_a_handler_raises_and_ends_no_process(four: list[Actor]) -> None:
    kind, text = four[0].do(failure, call, "w3", raise_system_exit)
    assert kind == "RemoteError"
    assert "SystemExit" in text
    assert four[0].do(call_many, "w3", 3) == 3
    assert max(shut_all_down(four)) < AT_ONCE


def test_ungraceful_shutdown_during_incoming_calls(four: list[Actor]) -> None:
    for actor in four[:3]:
        actor.do(begin_calls, "w3", hang, CALLS)
    four[3].begin(shut_down, False)
    for actor in four[:3]:
        failures = actor.do(failures_of_calls)[1]
        assert [kind for kind, _ in failures] == ["WorkerLost"] * CALLS
        assert "worker w3 is lost: it shut down" in failures[0][1]
    assert four[0].do(call_many, "w1", 10) == 10
    assert max(shut_all_down(four[:3])) < AT_ONCE


def test_ungraceful_shutdown_fails_outgoing_calls(four: list[Actor]) -> None:
    four[0].do(begin_calls, "w3", hang, CALLS)
    four[0].do(shut_down, False)
    failures = four[0].do(failures_of_calls)[1]
    assert [kind for kind, _ in failures] == ["NotInitialized"] * CALLS
    assert "was pending when this worker shut down" in failures[0][1]


def test_process_that_exits_without_shutdown(four: list[Actor]) -> None:
    """The process sends a goodbye, and no process prints anything."""
    for actor in four:
        actor.do(call_many, "w3", 3)
    assert four[3].leave() == 0
    kind, text = four[0].do(failure, call, "w3", abs, -1)
    assert (kind, "it shut down" in text) == ("WorkerLost", True)
    assert max(shut_all_down(four[:3])) < AT_ONCE
    assert [actor.leave() for actor in four[:3]] == [0, 0, 0]
    assert [actor.stderr() for actor in four] == [""] * 4


def test_process_that_exits_while_a_handler_hangs(four: list[Actor]) -> None:
    four[0].do(begin_calls, "w3", hang, 1)
    assert four[3].leave() == 0
    ((kind, text),) = four[0].do(failures_of_calls)[1]
    assert (kind, "it shut down" in text) == ("WorkerLost", True)
    assert four[3].stderr() == "worker w3 shut down while a handler still ran: its thread continues\n"


def test_an_ordinary_run_prints_nothing(four: list[Actor]) -> None:
    for actor in four:
        for other in four:
            actor.do(call_many, other.name, 5)
    four[0].do(make_reference, "thing", "w1")
    four[0].do(give, "thing", "w2")
    shut_all_down(four)
    assert [actor.leave() for actor in four] == [0] * 4
    assert [actor.stderr() for actor in four] == [""] * 4
