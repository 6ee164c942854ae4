"""`rpc.debug_info`: what a worker is doing."""

import asyncio
import os
import posix
import socket
import threading
import time

import pytest
import torch
from retry_helpers import FAST, TCP, break_connections

from telegrad import rpc
from telegrad.errors import NotInitialized, WorkerLost
from telegrad.testing import Cluster, Gate, Local, cluster, eventually
from telegrad.worker.diagnostics.running import NATIVE_FUNCTION


def test_needs_a_worker() -> None:
    with pytest.raises(NotInitialized):
        rpc.debug_info()


def test_an_idle_worker(clean: Cluster) -> None:
    rpc.rpc_sync("w1", max, args=(1, 2))
    eventually(lambda: clean[1].debug_info().counts.running_requests == 0)  # the reply leaves before the handler ends
    eventually(lambda: len((info := clean[1].debug_info()).threads) == info.counts.pool_threads)
    info = clean[1].debug_info()
    assert (info.worker, info.id, info.closed) == ("w1", 1, False)
    assert info.counts.pending_calls == info.counts.queued_requests == info.counts.running_requests == 0
    assert info.counts.received_messages >= 1
    assert info.requests == info.retries == ()
    assert info.references is not None
    assert info.references.owned == info.references.used == 0
    assert (info.contexts, info.passes) == (0, 0)
    assert all(name.startswith("telegrad-w1-") for name in info.threads)


def test_running_and_queued_requests() -> None:
    gate = Gate()
    with cluster(2, rpc.Options(num_worker_threads=1)) as group:
        first = rpc.rpc_async("w1", gate.enter, timeout=60)
        assert gate.entered.acquire(timeout=10)
        second = rpc.rpc_async("w1", max, args=(1, 2))
        eventually(lambda: group[1].debug_info().counts.queued_requests == 1)
        info = group[1].debug_info()
        request, queued = info.requests
        assert (queued.function, queued.caller, queued.state, queued.thread) == ("builtins.max", "w0", "queued", "")
        assert queued.time_left is not None
        assert 0 < queued.time_left <= 60
        assert (request.function, request.caller) == ("telegrad.testing.waiting.Gate.enter", "w0")
        assert request.state == "running"
        assert request.age >= 0
        assert request.time_left is not None
        assert 0 < request.time_left <= 60
        assert request.thread in info.threads
        assert group[0].debug_info().counts.pending_calls == 2
        assert "Gate.enter from w0: running for" in str(info)
        assert "builtins.max from w0: queued for" in str(info)
        gate.open()
        assert (first.wait(), second.wait()) == (None, 2)
        assert group[1].debug_info().requests == ()


def test_ages_count_from_the_call_and_from_its_handler(clean: Cluster) -> None:
    gate = Gate()
    before = time.monotonic()
    future = rpc.rpc_async("w1", gate.enter)
    assert gate.entered.acquire(timeout=10)
    begun = time.monotonic()
    eventually(lambda: time.monotonic() >= begun + 0.02)
    (request,), (call,) = clean[1].debug_info().requests, clean[0].debug_info().calls
    after = time.monotonic()
    assert 0.02 <= request.age <= after - before
    assert 0.02 <= call.age <= after - before
    gate.open()
    future.wait()


def test_calls_without_a_reply(clean: Cluster) -> None:
    gate = Gate()
    future = rpc.rpc_async("w1", gate.enter)
    assert gate.entered.acquire(timeout=10)
    (call,) = clean[0].debug_info().calls
    assert (call.function, call.to, call.state) == ("Gate.enter", "w1", "sent")
    assert "Gate.enter on w1: sent, " in str(clean[0].debug_info())
    assert clean[1].debug_info().calls == ()
    waiting = threading.Thread(target=lambda: clean[0].rpc_sync("w1", gate.enter))
    waiting.start()
    eventually(lambda: len(clean[0].debug_info().calls) == 2)
    gate.open()
    waiting.join(10)
    future.wait()
    assert clean[0].debug_info().calls == ()


def test_calls_that_wait() -> None:
    gate = Gate()
    options = rpc.Options(num_worker_threads=1, request_window_bytes=20_000, transports=("shm", "tcp"))
    with cluster(2, options) as group, socket.socket() as silent:
        first = rpc.rpc_async("w1", gate.enter, timeout=60)
        assert gate.entered.acquire(timeout=10)
        threads = [threading.Thread(target=group[0].rpc_sync, args=("w1", len, (b"x" * 15_000,))) for _ in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: [call.state for call in group[0].debug_info().calls].count("waiting for the window") == 1)
        gate.open()
        for thread in threads:
            thread.join(10)
        first.wait()
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # answers no handshake
        worker = group[0]._worker
        at = f"tcp:127.0.0.1:{silent.getsockname()[1]}"
        worker.add_member(worker.member._replace(id=7, name="mute", incarnation=1 << 32, addresses=(at,)))
        future = rpc.rpc_async("mute", max, args=(1, 2))
        (call,) = group[0].debug_info().calls
        assert (call.function, call.to, call.state) == ("builtins.max", "mute", "waiting for a connection")
        (peer,) = [peer for peer in group[0].debug_info().peers if peer.name == "mute"]
        assert (peer.state, peer.waiting, peer.incarnation) == ("connecting", 1, 1 << 32)
        worker.remove_member(7, "the test is over")
        with pytest.raises(WorkerLost):
            future.wait()


def test_a_function_without_python_code(clean: Cluster) -> None:
    read, write = os.pipe()
    future = rpc.rpc_async("w1", posix.read, args=(read, 1))
    eventually(lambda: [request.function for request in clean[1].debug_info().requests] == [NATIVE_FUNCTION])
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
    eventually(lambda: clean[1]._worker.loop._loop is not None)  # the request is deferred before the loop begins
    clean[1]._worker.loop._loop.call_soon_threadsafe(event.value.set)  # type: ignore[union-attr]
    assert future.wait() == 1


def enter(gate: Local[Gate]) -> str:
    gate.value.enter()
    return "text"


def test_a_request_that_waits_for_a_reference_is_parked(clean: Cluster) -> None:
    gate = Gate()
    rref = rpc.remote("w1", enter, args=(local := Local(gate),))
    assert gate.entered.acquire(timeout=10)
    future = rref.rpc_async().upper()
    eventually(lambda: clean[1].debug_info().counts.parked_requests == 1)
    running, parked = clean[1].debug_info().requests
    assert (running.function, running.caller, running.state) == (f"{__name__}.enter", "w0", "running")
    assert (parked.function, parked.caller, parked.state) == ("upper", "w0", "parked")
    gate.open()
    assert future.wait() == "TEXT"
    del local


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
    with cluster(3, rpc.Options(transports=("shm", "tcp")), graceful=False) as group:
        rpc.rpc_sync("w1", max, args=(1, 2))
        eventually(lambda: group[0].debug_info().peers[0].state == "connected")
        one, two = group[0].debug_info().peers
        assert (one.name, one.id, one.state, one.transport) == ("w1", 1, "connected", "shm")
        assert one.connection.startswith("to shm")
        assert (one.why, one.reason) == ("the first of the option transports that both offer", "")
        assert one.incarnation == group[1]._worker.incarnation
        (connection,) = [each for each in group[0].debug_info().connections if each.peer == "w1"]
        assert (connection.state, connection.where, connection.unprocessed) == ("open", one.connection, 0)
        assert (two.name, two.state, two.transport) == ("w2", "not connected", "")
        group[1].shutdown(graceful=False)
        eventually(lambda: group[0].debug_info().peers[0].state == "left")
        assert group[0].debug_info().peers[0].reason == "it shut down"
        assert ") left: it shut down" in str(group[0].debug_info())


def test_why_a_faster_transport_is_not_used() -> None:
    with cluster(2, rpc.Options(transports=("tcp",))) as group:
        group[0]._worker.options.transports = ("unix", "tcp")
        rpc.rpc_sync("w1", max, args=(1, 2))
        eventually(lambda: group[0].debug_info().peers[0].state == "connected")
        (peer,) = group[0].debug_info().peers
        assert peer.transport == "tcp"
        assert peer.why == "not unix: w1 does not listen there, by its option transports"
        assert ") connected to tcp:127.0.0.1:" in str(group[0].debug_info())


def test_the_epoch_grows_with_each_session() -> None:
    with cluster(2, TCP) as group:
        rpc.rpc_sync("w1", max, args=(1, 2))
        (before,) = group[0].debug_info().peers
        assert break_connections()
        eventually(lambda: group[0].debug_info().peers[0].state == "lost")
        assert rpc.rpc_sync("w1", max, args=(1, 2), retry=FAST) == 2
        (after,) = group[0].debug_info().peers
        assert after.state == "connected"
        assert after.epoch > before.epoch
        assert after.incarnation == before.incarnation


def test_the_group() -> None:
    with cluster(3) as group:
        info = group[0].debug_info()
        assert info.incarnation == group[0]._worker.incarnation
        membership = info.membership
        assert membership is not None
        assert [(member.name, member.id) for member in membership.members] == [("w0", 0), ("w1", 1), ("w2", 2)]
        assert [member.incarnation for member in membership.members] == [each._worker.incarnation for each in group]
        assert membership.lease == rpc.Options().member_lease
        assert 0 <= membership.renewed < membership.lease
        assert f"group at epoch {membership.epoch} (" in str(info)


def test_a_dynamic_group_and_its_leases() -> None:
    with cluster(2, rpc.Options(member_lease=1), dynamic=True) as group:
        eventually(lambda: group[0].debug_info().membership.members[1].lease_age is not None)  # type: ignore[union-attr]
        before = group[0].debug_info().membership
        assert before is not None
        assert before.epoch >= 2
        assert before.members[0].lease_age is None  # its own
        joined = rpc.Worker("w2", store=group.store)
        group.workers.append(joined)
        eventually(lambda: group[0].debug_info().membership.epoch > before.epoch)  # type: ignore[union-attr]


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
    assert info.calls == info.requests == info.connections == ()
    assert info.membership is None
    assert info.counts.pending_calls == 0
    assert f"worker w0 (id 0, incarnation {info.incarnation}, closed)" in str(info)


def test_handlers_may_ask(clean: Cluster) -> None:
    text = rpc.rpc_sync("w1", lambda: str(rpc.debug_info()))
    assert "worker w1 (id 1, incarnation" in text
    assert "<lambda> from w0: running" in text
