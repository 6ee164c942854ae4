"""`rpc.debug_info`: what a worker is doing."""

import asyncio
import os
import posix
import threading
import time

import pytest
import torch

from telegrad import rpc
from telegrad.errors import NotInitialized
from telegrad.testing import Cluster, Gate, Local, cluster, eventually
from telegrad.worker.diagnostics.callers import Callers
from telegrad.worker.diagnostics.running import NATIVE_FUNCTION


def test_needs_a_worker() -> None:
    with pytest.raises(NotInitialized):
        rpc.debug_info()


def test_an_idle_worker(clean: Cluster) -> None:
    rpc.rpc_sync("w1", max, args=(1, 2))
    info = clean[1].debug_info()
    assert (info.worker, info.id, info.closed) == ("w1", 1, False)
    assert info.counts.pending_calls == info.counts.queued_requests == info.counts.running_requests == 0
    assert info.counts.received_messages >= 1
    assert info.requests == info.retries == ()
    assert info.references is not None
    assert info.references.owned == info.references.used == 0
    assert (info.contexts, info.passes) == (0, 0)
    assert all(name.startswith("telegrad-w1-") for name in info.threads)
    assert len(info.threads) == info.counts.pool_threads


def test_running_and_queued_requests() -> None:
    gate = Gate()
    with cluster(2, rpc.Options(num_worker_threads=1)) as group:
        first = rpc.rpc_async("w1", gate.enter, timeout=60)
        assert gate.entered.acquire(timeout=10)
        second = rpc.rpc_async("w1", max, args=(1, 2))
        eventually(lambda: group[1].debug_info().counts.queued_requests == 1)
        info = group[1].debug_info()
        (request,) = info.requests
        assert (request.function, request.caller) == ("telegrad.testing.waiting.Gate.enter", "w0")
        assert request.state == "running"
        assert request.age >= 0
        assert request.time_left is not None
        assert 0 < request.time_left <= 60
        assert request.thread in info.threads
        assert group[0].debug_info().counts.pending_calls == 2
        assert "Gate.enter from w0: running for at least" in str(info)
        gate.open()
        assert (first.wait(), second.wait()) == (None, 2)
        assert group[1].debug_info().requests == ()


def test_the_age_counts_from_the_first_snapshot(clean: Cluster) -> None:
    gate = Gate()
    future = rpc.rpc_async("w1", gate.enter)
    assert gate.entered.acquire(timeout=10)
    now = [100.0]
    clean[1]._worker.running._clock = lambda: now[0]
    assert clean[1].debug_info().requests[0].age == 0
    now[0] += 7
    assert clean[1].debug_info().requests[0].age == 7
    clean[1]._worker.running._clock = time.monotonic
    gate.open()
    future.wait()


def test_a_function_without_python_code(clean: Cluster) -> None:
    read, write = os.pipe()
    future = rpc.rpc_async("w1", posix.read, args=(read, 1))
    eventually(lambda: clean[1].debug_info().requests)
    assert clean[1].debug_info().requests[0].function == NATIVE_FUNCTION
    os.write(write, b"x")
    assert future.wait() == b"x"
    os.close(read)
    os.close(write)


def test_within_interceptors_the_program_s_function_is_shown(clean: Cluster) -> None:
    gate = Gate()
    with clean[1], rpc.intercept(server=lambda call, proceed: proceed(call)), clean[0]:
        future = rpc.rpc_async("w1", gate.enter)
        assert gate.entered.acquire(timeout=10)
        assert clean[1].debug_info().requests[0].function == "telegrad.testing.waiting.Gate.enter"
        gate.open()
        future.wait()


async def wait_for(event: Local[asyncio.Event]) -> int:
    await event.value.wait()
    return 1


def test_a_coroutine_is_deferred(clean: Cluster) -> None:
    event = Local(asyncio.Event())
    future = rpc.rpc_async("w1", wait_for, args=(event,))
    eventually(lambda: [request.state for request in clean[1].debug_info().requests] == ["deferred"])
    (request,) = clean[1].debug_info().requests
    assert (request.function, request.caller, request.state) == (f"{__name__}.wait_for", "w0", "deferred")
    assert request.thread == ""
    assert clean[1].debug_info().counts.deferred_requests == 1
    clean[1]._worker.loop._loop.call_soon_threadsafe(event.value.set)  # type: ignore[union-attr]
    assert future.wait() == 1


def test_references(clean: Cluster) -> None:
    rref = rpc.remote("w1", torch.ones, args=(2,))
    rref.to_here()
    owner, user = clean[1].debug_info().references, clean[0].debug_info().references
    assert owner is not None
    assert user is not None
    assert (owner.owned, owner.forks, user.used) == (1, 1, 1)
    del rref
    eventually(lambda: clean[1].debug_info().references.owned == 0)  # type: ignore[union-attr]


def test_it_does_not_wait_for_a_held_table(clean: Cluster) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with clean[1]._worker.references.lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    info = clean[1].debug_info()
    done.set()
    thread.join()
    assert info.references is None
    assert "references: not readable" in str(info)


def test_peers() -> None:
    with cluster(3, graceful=False) as group:
        rpc.rpc_sync("w1", max, args=(1, 2))
        eventually(lambda: group[0].debug_info().peers[0].state == "connected")
        one, two = group[0].debug_info().peers
        assert (one.name, one.id, one.state, one.transport) == ("w1", 1, "connected", "shm")
        assert one.connection.startswith("to shm")
        assert (one.why_not_faster, one.reason) == ("", "")
        assert (two.name, two.state, two.transport) == ("w2", "not connected", "")
        group[1].shutdown(graceful=False)
        eventually(lambda: group[0].debug_info().peers[0].state == "left")
        assert group[0].debug_info().peers[0].reason == "it shut down"
        assert "w1 (id 1) left: it shut down" in str(group[0].debug_info())


def test_why_a_faster_transport_is_not_used() -> None:
    with cluster(2, rpc.Options(transports=("tcp",))) as group:
        group[0]._worker.options.transports = ("unix", "tcp")
        rpc.rpc_sync("w1", max, args=(1, 2))
        eventually(lambda: group[0].debug_info().peers[0].state == "connected")
        (peer,) = group[0].debug_info().peers
        assert peer.transport == "tcp"
        assert "not unix: w1 does not listen there" in peer.why_not_faster
        assert "w1 (id 1) connected to tcp:127.0.0.1:" in str(group[0].debug_info())


def test_the_options_without_secrets() -> None:
    with cluster(2, rpc.Options(secret="0123456789abcdef", spin_us=7)) as group:
        info = group[0].debug_info()
    assert info.options["spin_us"] == 7
    assert "secret" not in info.options
    assert "0123456789abcdef" not in str(info)


def test_a_closed_worker() -> None:
    with cluster(2) as group:
        workers = list(group)
    info = workers[0].debug_info()
    assert info.closed
    assert info.counts.pending_calls == 0
    assert "worker w0 (id 0, closed)" in str(info)


def test_handlers_may_ask(clean: Cluster) -> None:
    text = rpc.rpc_sync("w1", lambda: str(rpc.debug_info()))
    assert "worker w1 (id 1)" in text
    assert "<lambda> from w0: running" in text


def test_callers_forget_old_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.worker.diagnostics.callers._MOST", 2)
    callers = Callers(str)
    for connection in range(3):
        callers.add(connection, 10 + connection)
    assert [callers.name_of(connection) for connection in range(3)] == [None, None, "12"]
