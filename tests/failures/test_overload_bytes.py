"""Limits of bytes of requests and kept results, and figures of other limits."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from raw_peer_helpers import REQUEST, WELCOME, RawPeer, frame, member, reachable

from telegrad import rpc
from telegrad.errors import MessageTooLarge, Overloaded, RpcTimeout
from telegrad.testing import Cluster, Gate, Local, assert_quiescent, cluster, eventually
from telegrad.wire import Tag

SOON = 0.05  # s
MIB = 1 << 20
LARGE = 256 << 10


def limit_of(group: Cluster, rank: int, name: str) -> Any:
    return group[rank].debug_info().limits[name]


# ---- bytes of requests without a reply


@pytest.fixture
def small() -> Iterator[Cluster]:
    with cluster(2, reachable(max_in_flight_bytes=MIB, num_worker_threads=2)) as group:
        yield group
        for worker in group:
            assert_quiescent(worker)


async def hold(event: Local[asyncio.Event], data: object) -> int:
    await event.value.wait()
    return 1


@pytest.mark.parametrize("data", [bytes(LARGE), torch.zeros(LARGE, dtype=torch.uint8)], ids=["bytes", "tensor"])
def test_coroutines_with_large_arguments(small: Cluster, data: object) -> None:
    """Their arguments count until they are done; small calls go on."""
    event = Local(asyncio.Event())
    running = [rpc.rpc_async("w1", hold, (event, data)) for _ in range(3)]
    eventually(lambda: small[1].debug_info().counts.deferred_requests == 3)
    assert 3 * LARGE <= limit_of(small, 0, "max_in_flight_bytes").used <= MIB
    with pytest.raises(RpcTimeout, match="waiting"):
        rpc.rpc_sync("w1", len, (data,), timeout=SOON)

    async def make() -> Any:
        return rpc.rpc_async("w1", len, (data,))

    with pytest.raises(Overloaded, match="max_in_flight_bytes: worker w1 has not replied") as raised:
        asyncio.run(make()).wait()
    assert raised.value.limit == "max_in_flight_bytes"
    assert rpc.rpc_sync("w1", abs, (-1,)) == 1
    assert small[1].rpc_sync("w0", len, (data,)) == LARGE
    small[1]._worker.loop._loop.call_soon_threadsafe(event.value.set)  # type: ignore[union-attr]
    assert [future.wait() for future in running] == [1, 1, 1]
    assert rpc.rpc_sync("w1", len, (data,)) == LARGE
    figure = limit_of(small, 0, "max_in_flight_bytes")
    assert (figure.used, figure.limit, figure.refused) == (0, MIB, 1)


def test_a_call_larger_than_the_limit_is_made_alone(small: Cluster) -> None:
    assert rpc.rpc_sync("w1", len, (bytes(3 * MIB),)) == 3 * MIB
    futures = [rpc.rpc_async("w1", len, (bytes(2 * MIB),)) for _ in range(3)]
    assert [future.wait() for future in futures] == [2 * MIB] * 3


def test_creations_and_references_over_the_limit(small: Cluster) -> None:
    gate = Gate()
    running = rpc.rpc_async("w1", gate.enter, (bytes(MIB),))
    gate.wait_for()
    value = rpc.remote("w1", abs, (-1,))

    async def make() -> tuple[Any, Any]:
        return rpc.remote("w1", len, (bytes(LARGE),)), rpc.rpc_async("w1", repr, ((value, bytes(LARGE)),))

    failed, with_reference = asyncio.run(make())
    for use in (failed.to_here, with_reference.wait):
        with pytest.raises(Overloaded, match="max_in_flight_bytes"):
            use()
    gate.open()
    running.wait()
    assert value.to_here() == 1


def test_a_member_that_does_not_wait_for_replies_to_large_requests(small: Cluster) -> None:
    gate = Gate()
    running = [rpc.rpc_async("w1", gate.enter) for _ in range(2)]  # on both threads
    gate.wait_for(2)
    size = 10 * MIB
    with RawPeer(small[1], "unix") as raw:
        assert raw.join(member(9, "flood")) == WELCOME
        for number in range(8):  # without one of them, the last is over twice the limit and 64 MiB
            raw.send(frame(REQUEST, bytes(size), tag=Tag.CALL, call=1 + number))
        eventually(lambda: small[1].debug_info().counts.queued_requests == 8)
        raw.send(frame(REQUEST, bytes(size), tag=Tag.CALL, call=9))
        raw.ended()
    eventually(lambda: "max_in_flight_bytes: 1048576" in small[1]._worker.members.lost.get(9, ""))
    gate.open()
    for future in running:
        future.wait()
    assert rpc.rpc_sync("w1", abs, (-3,)) == 3
    eventually(lambda: small[1].debug_info().counts.queued_requests == 0)


# ---- results that are kept for calls with a Retry


def test_results_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2, rpc.Options(retry_results_bytes=MIB)) as group:
        monkeypatch.setattr(group[0]._worker.retries, "settle_run", lambda call: None)  # its requests list all runs
        retry = rpc.Retry(attempts=2)
        for _ in range(8):
            assert len(rpc.rpc_sync("w1", bytes, (LARGE,), retry=retry)) == LARGE
            assert 0 < limit_of(group, 1, "retry_results_bytes").used <= MIB
        figure = limit_of(group, 1, "retry_results_bytes")
        assert (figure.limit, figure.refused) == (MIB, 5)
        assert limit_of(group, 0, "retry_results_bytes").used == 0


# ---- figures


def test_the_largest_message() -> None:
    with cluster(2, rpc.Options(max_header_bytes=MIB, max_message_bytes=2 * MIB)) as group:
        rpc.rpc_sync("w1", len, (bytes(LARGE),))
        rpc.rpc_sync("w1", torch.numel, (torch.zeros(MIB, dtype=torch.uint8),))
        assert LARGE < limit_of(group, 1, "max_header_bytes").used < MIB
        assert limit_of(group, 1, "max_message_bytes").used == MIB
        for value in (bytes(2 * MIB), torch.zeros(3 * MIB, dtype=torch.uint8)):
            with pytest.raises(MessageTooLarge):
                rpc.rpc_sync("w1", type, (value,))
        for name in ("max_header_bytes", "max_message_bytes"):
            assert limit_of(group, 0, name).refused == 1


def test_names() -> None:
    with cluster(2) as group:
        before = limit_of(group, 0, "interned_names").used
        for function in (abs, len, repr):
            rpc.rpc_sync("w1", function, ([],) if function is len else (1,))
        assert limit_of(group, 0, "interned_names").used >= before + 3
        assert limit_of(group, 1, "interned_names").used >= 3
        assert limit_of(group, 0, "interned_names").refused == 0


def test_connections_without_a_handshake() -> None:
    with cluster(2, reachable(max_unauthenticated=2)) as group:
        rpc.rpc_sync("w1", abs, (-1,))
        with ExitStack() as unauthenticated:
            for _ in range(5):
                unauthenticated.enter_context(RawPeer(group[1], "unix"))
            eventually(lambda: limit_of(group, 1, "max_unauthenticated").refused == 3)
            assert limit_of(group, 1, "max_unauthenticated").used == 2
            assert limit_of(group, 1, "max_unauthenticated").limit == 2
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1
