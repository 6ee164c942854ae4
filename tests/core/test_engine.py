"""`_core.Engine` from Python: ownership, the GIL, and untrusted connections."""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
from engine_helpers import ECHO, HOLD, NEVER, Native

from telegrad import _core
from telegrad.testing import eventually
from telegrad.wire.layout import EventKind
from telegrad.wire.tags import Status


@pytest.fixture
def pair() -> Iterator[tuple[Native, Native]]:
    a, b = Native(0), Native(1)
    for w in (a, b):
        w.meet(0, a.address)
        w.meet(1, b.address)
    yield a, b
    a.stop()
    b.stop()


def test_bodies_and_segments(pair: tuple[Native, Native]) -> None:
    a, _ = pair
    for size in (0, 1, 65535, 65536, 65537, 1_000_000):
        body = os.urandom(size)
        status, _, _, got, segments, peer, _, why, _ = a.call(1, ECHO, body, [body, b"", body[::-1]])
        assert (status, bytes(got), peer, why) == (Status.REPLIED, body, 1, None)
        assert [bytes(s) for s in segments] == [body, b"", body[::-1]]
        assert [len(s) for s in segments] == [size, 0, size]


def test_received_memory_is_aligned_writable_and_outlives_the_engine(pair: tuple[Native, Native]) -> None:
    a, b = pair
    blocks = a.call(1, ECHO, b"", [bytes(100_000), b"xyz"])[4]
    a.stop()
    b.stop()
    for block in blocks:
        address, size = _core.buffer_address(block)
        assert address % 64 == 0
        assert size == len(block)
        view = memoryview(block)
        view[0] = 7
        assert not view.readonly
    assert bytes(blocks[1]) == b"\x07yz"


def test_each_completion_has_its_own_status(pair: tuple[Native, Native]) -> None:
    a, b = pair
    assert a.call(1, NEVER, timeout=1_000_000)[0] == Status.TIMED_OUT
    assert a.call(9)[0] == Status.UNREACHABLE
    assert a.call(9)[7] == "no such worker"
    assert a.call(1)[0] == Status.REPLIED  # earlier messages have arrived by now
    before = b.engine.stats()["requests"]
    waiting: list[int] = []
    thread = threading.Thread(target=lambda: waiting.append(a.call(1, NEVER)[0]))
    thread.start()
    while b.engine.stats()["requests"] == before:
        pass
    b.stop()
    thread.join()
    assert waiting == [Status.PEER_LOST]
    a.stop()
    assert a.call(1)[0] == Status.STOPPED


class Tracked:
    """Object for weak references."""


def test_passed_objects_are_released(pair: tuple[Native, Native]) -> None:
    a, b = pair
    watched: list[weakref.ref[Tracked]] = []

    def thing() -> Tracked:
        t = Tracked()
        watched.append(weakref.ref(t))
        return t

    body = os.urandom(50_000)
    buffer = bytearray(os.urandom(200_000))
    before = sys.getrefcount(body)
    for i in range(20):
        owner = thing()
        owner.buffer = buffer  # type: ignore[attr-defined]
        segment = (*_core.buffer_address(buffer), owner)
        a.start(1 if i % 2 else 9, thing(), ECHO, body, [segment])
        del owner, segment
    a.wait_for(lambda: len(a.completions) == 20)
    a.completions.clear()
    b.call(0)  # any call releases what other threads have deferred
    a.call(1)
    gc.collect()
    assert not [w for w in watched if w() is not None]
    assert sys.getrefcount(body) == before
    assert a.engine.stats()["pending_calls"] == 0


def test_an_engine_is_dropped_with_calls_in_flight() -> None:
    a, b = Native(0, threads=0), Native(1)
    a.meet(1, b.address)
    watched = weakref.ref(target := Tracked())
    a.start(1, target, NEVER)
    del target
    fds = len(os.listdir("/proc/self/fd"))
    del a.engine
    gc.collect()
    b.call(9)
    assert watched() is None
    assert len(os.listdir("/proc/self/fd")) < fds
    b.stop()


def test_waiting_releases_the_gil(pair: tuple[Native, Native]) -> None:
    a, b = pair
    completion = []
    thread = threading.Thread(target=lambda: completion.append(a.call(1, HOLD, b"x")))
    thread.start()
    for _ in range(200):
        assert a.call(1, ECHO, b"y")[3] == b"y"
    assert not completion
    b.release.set()
    thread.join()
    assert completion[0][3] == b"x"


def test_many_python_threads(pair: tuple[Native, Native]) -> None:
    a, b = pair
    failed = []

    def calls(worker: Native, peer: int) -> None:
        for i in range(300):
            body = b"%d" % i
            if worker.call(peer, ECHO, body)[3] != body:
                failed.append(i)

    threads = [threading.Thread(target=calls, args=(w, p)) for w, p in ((a, 1), (b, 0), (a, 0), (a, 1))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed


def hello() -> bytes:
    """Return the recorded first bytes that an engine sends."""
    listener = socket.socket(socket.AF_UNIX)
    name = f"\0telegrad-test-record-{os.getpid()}"
    listener.bind(name)
    listener.listen()
    native = Native(5)
    native.meet(0, f"unix:@{name[1:]}")
    native.start(0, "target")
    connection, _ = listener.accept()
    recorded = connection.recv(4096)
    native.stop()
    connection.close()
    listener.close()
    return recorded


def test_a_hostile_byte_stream(pair: tuple[Native, Native]) -> None:
    """Noise and truncated or corrupted handshakes close only their own connection."""
    a, b = pair
    rng = random.Random(1)
    greeting = hello()
    assert b.call(0)[0] == Status.REPLIED
    fds = len(os.listdir("/proc/self/fd"))
    streams = [rng.randbytes(rng.randrange(1, 5000)) for _ in range(20)]
    streams += [greeting[:n] for n in range(0, len(greeting), 7)]
    for _ in range(100):
        changed = bytearray(greeting)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        streams.append(bytes(changed) + rng.randbytes(rng.randrange(0, 200)))
    for stream in streams:
        with socket.socket(socket.AF_UNIX) as s:
            s.connect("\0" + a.address[len("unix:@") :])
            s.sendall(stream)
            s.shutdown(socket.SHUT_WR)
            try:
                while s.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        assert b.call(0, ECHO, b"well")[3] == b"well"
    assert a.engine.stats()["connections"] == b.engine.stats()["connections"] == 1
    assert a.engine.stats()["requests"] == len(streams) + 1
    a.wait_for(lambda: any(kind == EventKind.LOG for kind, _ in a.events))
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds)


def test_a_call_after_stop_is_rejected(pair: tuple[Native, Native]) -> None:
    """No pool thread is left to complete it."""
    a, _ = pair
    a.stop()
    target = threading.Event()
    gone = weakref.ref(target)
    assert a.start(1, target) == 0
    assert a.start(1, target, segments=[bytes(1 << 20)]) == 0
    del target
    assert gone() is None
    assert a.completions == []
