"""Engines in separate processes: killed, stopped, interrupted, forked."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from engine_helpers import ECHO, FORK, HOLD, NEVER, WINDOW, Child, Native
from stopped_processes import resume, stop

from telegrad.wire import Loss
from telegrad.wire.layout import EventKind
from telegrad.wire.tags import Status


@pytest.fixture
def worker() -> Iterator[Native]:
    native = Native(0)
    yield native
    native.stop()


@pytest.fixture
def spawn(worker: Native) -> Iterator[Callable[..., Child]]:
    with ExitStack() as stack:

        def start(ident: int, *more: str) -> Child:
            child = Child(ident, *more)
            stack.callback(child.end)
            worker.meet(ident, child.address)
            return child

        yield start


class Waiting:
    """Call in a separate thread."""

    def __init__(self, worker: Native, peer: int, tag: int, body: bytes = b""):
        self.thread = threading.Thread(target=self.run, args=(worker, peer, tag, body))
        self.thread.start()

    def run(self, worker: Native, peer: int, tag: int, body: bytes) -> None:
        self.completion = worker.call(peer, tag, body)
        self.ended = time.monotonic()

    def join(self) -> tuple[int, str]:
        self.thread.join()
        return self.completion[0], self.completion[7]


def test_a_killed_peer_fails_its_callers_at_once(worker: Native, spawn: Callable[..., Child]) -> None:
    victim, other = spawn(1), spawn(2)
    waiting = [Waiting(worker, 1, NEVER) for _ in range(3)]
    worker.start(1, "target", NEVER)
    for _ in range(4):
        assert victim.line() == f"handling {NEVER}"
    held = Waiting(worker, 2, HOLD)
    assert other.line() == f"handling {HOLD}"

    start = time.monotonic()
    victim.kill()
    for w in waiting:
        status, why = w.join()
        assert status == Status.PEER_LOST
        assert why.startswith("the connection was closed without a goodbye: its process died or was killed")
        assert w.completion[8] == Loss.CLOSED
        assert w.ended - start < 2
    worker.wait_for(lambda: worker.completions)
    target, completion = worker.completions[0]
    assert (target, completion[0], completion[8]) == ("target", Status.PEER_LOST, Loss.CLOSED)
    worker.wait_for(lambda: any(event[0] == EventKind.PEER_LOST for event in worker.events))

    assert worker.call(2, ECHO, b"still here")[3] == b"still here"
    assert held.thread.is_alive()
    assert worker.call(1)[0] == Status.UNREACHABLE
    other.kill()
    assert held.join()[0] == Status.PEER_LOST


def test_a_peer_is_killed_while_receiving(worker: Native, spawn: Callable[..., Child]) -> None:
    victim, other = spawn(1), spawn(2)
    assert worker.call(1)[0] == Status.REPLIED
    stop(victim.process.pid)
    stuck = [Waiting(worker, 1, ECHO, bytes(16 << 20)) for _ in range(2)]
    for i in range(200):  # a peer that does not read delays no other call
        assert worker.call(2, ECHO, b"%d" % i)[3] == b"%d" % i
    assert all(s.thread.is_alive() for s in stuck)
    victim.kill()
    for s in stuck:
        assert s.join()[0] == Status.PEER_LOST
    assert other.process.poll() is None


def test_a_stopped_peer_resumes(worker: Native, spawn: Callable[..., Child]) -> None:
    child = spawn(1)
    stop(child.process.pid)
    waiting = Waiting(worker, 1, ECHO, b"hello" * 1000)
    resume(child.process.pid)
    assert waiting.join()[0] == Status.REPLIED


@pytest.mark.parametrize(("tag", "size"), [(NEVER, 10), (ECHO, 8 << 20), (WINDOW, 40 << 20)])
def test_control_c_ends_a_call(worker: Native, spawn: Callable[..., Child], tag: int, size: int) -> None:
    """Calls without reply, with unsent tensors, and waiting for the window."""
    silent = spawn(1)
    caller = spawn(2, "1", silent.address, str(tag), str(size))
    assert caller.line() == f"connected {Status.REPLIED}"
    stop(silent.process.pid)
    caller.tell("go")
    assert caller.line() == "under way"
    caller.kill(signal.SIGINT)
    assert caller.line() == "interrupted"
    assert caller.line() == "alive"
    assert worker.call(2, ECHO, b"alive")[3] == b"alive"


def test_a_forked_child_does_not_hold_links(worker: Native, spawn: Callable[..., Child]) -> None:
    parent = spawn(1)
    assert worker.call(1, FORK)[0] == Status.REPLIED  # its child lives as long as our end of the pipe
    assert worker.call(1, ECHO, b"x")[3] == b"x"
    waiting = Waiting(worker, 1, NEVER)
    for tag in (FORK, ECHO, NEVER):
        assert parent.line() == f"handling {tag}"
    parent.kill()
    assert waiting.join()[0] == Status.PEER_LOST
