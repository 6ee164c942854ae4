"""A worker without descriptors or memory: clear errors, and it recovers."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_helpers import check_clean, shut_down
from process_helpers import Actor, actors, call_many, failure, state

from telegrad import rpc

LIMIT = 256  # descriptors


@pytest.fixture(params=["shm", *(pytest.param(each, marks=pytest.mark.slow) for each in ("unix", "tcp"))])
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, transports=(request.param,), connect_timeout=2.0, rpc_timeout=0) as group:
        yield group


# ---- steps


def take_descriptors() -> int:
    """Open files until there is no descriptor left."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken: list[int] = []
    state["taken"] = taken
    while True:
        try:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return len(taken)


def return_descriptors() -> None:
    for fd in state.pop("taken"):
        os.close(fd)


def call(to: str) -> int:
    return int(rpc.rpc_sync(to, abs, (-5,), timeout=0))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- tests


def test_a_caller_without_descriptors(three: list[Actor]) -> None:
    """Its open connections serve on; a new one fails until there are descriptors."""
    caller, known, other = three
    assert caller.do(call_many, "w1", 2) == known.do(call_many, "w0", 2) == 2
    assert caller.do(take_descriptors) > 0
    assert caller.do(call_many, "w1", 100) == known.do(call_many, "w0", 100) == 100
    kind, text = caller.do(failure, call, "w2")
    assert kind == "WorkerLost"
    assert "Too many open files" in text
    caller.do(return_descriptors)
    assert caller.do(call, "w2") == 5
    assert other.do(call, "w0") == 5
    check_clean(*three)
    shut_down(*three)


def test_a_callee_without_descriptors(three: list[Actor]) -> None:
    """A caller that cannot be accepted gets an error in bounded time."""
    caller, callee, known = three
    assert known.do(call_many, "w1", 2) == 2
    callee.do(take_descriptors)
    assert known.do(call_many, "w1", 100) == 100
    kind, _ = caller.do(failure, call, "w1")
    assert kind == "WorkerLost"
    callee.do(return_descriptors)
    assert caller.do(call, "w1") == 5
    assert callee.do(descriptors) < LIMIT / 2
    check_clean(*three)
    shut_down(*three)
