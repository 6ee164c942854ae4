"""Too many calls at once fail with `Overloaded`, and nothing else breaks."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch
from process_helpers import Actor, actors, call_many, state
from raw_peer_helpers import REFUSE, REPLY, REQUEST, WELCOME, RawPeer, frame, member, reachable

from telegrad import autograd, rpc
from telegrad.errors import Overloaded, RpcTimeout
from telegrad.testing import Cluster, Gate, Local, assert_quiescent, cluster, eventually
from telegrad.wire import LeftOut, Tag

SOON = 0.05  # s


def limit_of(group: Cluster, rank: int, name: str) -> Any:
    return group[rank].debug_info().limits[name]


# ---- the depth of nested calls


def other() -> str:
    return "w1" if rpc.get_worker_info().name == "w0" else "w0"


def descend(levels: int) -> int:
    return 1 + rpc.rpc_sync(other(), descend, (levels - 1,)) if levels else 1


def descend_by_future(levels: int) -> int:
    return 1 + rpc.rpc_async(other(), descend_by_future, (levels - 1,)).wait() if levels else 1


async def descend_by_coroutine(levels: int) -> int:
    return 1 + await rpc.rpc_async(other(), descend_by_coroutine, (levels - 1,)) if levels else 1


def descend_by_reference(levels: int) -> int:
    return 1 + int(rpc.remote(other(), descend_by_reference, (levels - 1,)).to_here()) if levels else 1


def descend_to_many(levels: int) -> int:
    return 1 + rpc.multicast([other()], descend_to_many, (levels - 1,))[0].wait() if levels else 1


def descend_with_reference(levels: int, value: rpc.RRef[int] | None = None) -> int:
    value = value or rpc.RRef(levels)
    return 1 + rpc.rpc_sync(other(), descend_with_reference, (levels - 1, value)) if levels else 1


def descend_by_callback(levels: int) -> int:
    if not levels:
        return 1
    return rpc.rpc_async(other(), descend_by_callback, (levels - 1,)).then(lambda done: 1 + done.wait()).wait()


WAYS: dict[str, Callable[[int], Any]] = {
    "sync": descend,
    "future": descend_by_future,
    "coroutine": descend_by_coroutine,
    "reference": descend_by_reference,
    "multicast": descend_to_many,
    "with a reference": descend_with_reference,
    "callback": descend_by_callback,
}


@pytest.mark.parametrize("intercepted", [False, True])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_functions_that_call_each_other_without_end(way: Callable[[int], Any], intercepted: bool) -> None:
    with cluster(2, rpc.Options(max_call_depth=8)) as group:
        with rpc.intercept(client=lambda call, proceed: proceed(call)) if intercepted else nullcontext():
            assert rpc.rpc_sync("w1", way, (8,)) == 9
            threads = [worker.debug_info().counts.pool_threads for worker in group]
            with pytest.raises(Overloaded, match="max_call_depth"):
                rpc.rpc_sync("w1", way, (1000,))
            after = [worker.debug_info().counts.pool_threads for worker in group]
            assert max(after) <= max(threads) + 8
        for worker in group:
            assert_quiescent(worker)


def test_the_error_names_the_option() -> None:
    with cluster(2, rpc.Options(max_call_depth=3)):
        with pytest.raises(Overloaded) as raised:
            rpc.rpc_sync("w1", descend, (100,))
        assert raised.value.limit == "max_call_depth"
        assert "descend on w" in str(raised.value)
        assert rpc.rpc_sync("w1", descend, (3,)) == 4


def test_a_member_cannot_nest_more_deeply_than_its_callee_allows(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(2, reachable(max_call_depth=5)) as group, RawPeer(group[1], "unix") as raw:
        assert raw.join(member(9, "deep")) == WELCOME
        raw.send(frame(REQUEST, b"anything", tag=Tag.CALL, call=7, depth=6))
        kind, call, body = raw.receive_call()
        assert (kind, call, body[0]) == (REPLY, 7, LeftOut.OVERLOADED)
        assert body[1:].startswith(b"max_call_depth: ")
        raw.send(frame(REQUEST, b"anything", tag=Tag.CALL, call=8, depth=5))
        assert raw.receive_call()[2][0] != LeftOut.OVERLOADED
        assert limit_of(group, 1, "max_call_depth").refused == 1


# ---- requests without a reply


@pytest.fixture
def few() -> Iterator[Cluster]:
    with cluster(2, reachable(max_in_flight=2, num_worker_threads=2)) as group:
        yield group
        for worker in group:
            assert_quiescent(worker)


def on_event_loop(function: Callable[[], Any]) -> Any:
    """Run a function where calls must not block."""

    async def run() -> Any:
        return function()

    return asyncio.run(run())


def test_calls_wait_while_too_many_have_no_reply(few: Cluster) -> None:
    gate = Gate()
    running = [rpc.rpc_async("w1", gate.enter, (i,)) for i in range(2)]
    gate.wait_for(2)
    assert limit_of(few, 0, "max_in_flight").used == 2
    with pytest.raises(RpcTimeout, match="waiting"):
        rpc.rpc_sync("w1", abs, (-1,), timeout=SOON)
    with pytest.raises(Overloaded, match="max_in_flight") as raised:
        on_event_loop(lambda: rpc.rpc_async("w1", abs, (-1,))).wait()
    assert raised.value.limit == "max_in_flight"
    gate.open()
    assert [future.wait() for future in running] == [0, 1]
    assert [rpc.rpc_async("w1", abs, (-i,)).wait() for i in range(20)] == list(range(20))
    limit = limit_of(few, 0, "max_in_flight")
    assert (limit.used, limit.limit, limit.refused) == (0, 2, 1)


async def wait_for(event: Local[asyncio.Event]) -> int:
    await event.value.wait()
    return 1


def test_coroutines_count_until_they_are_done(few: Cluster) -> None:
    event = Local(asyncio.Event())
    futures = [rpc.rpc_async("w1", wait_for, (event,)) for _ in range(2)]
    eventually(lambda: few[1].debug_info().counts.deferred_requests == 2)
    with pytest.raises(RpcTimeout, match="waiting"):
        rpc.rpc_sync("w1", abs, (-1,), timeout=SOON)
    few[1]._worker.loop._loop.call_soon_threadsafe(event.value.set)  # type: ignore[union-attr]
    assert [future.wait() for future in futures] == [1, 1]


def test_creations_and_references_of_calls_that_are_not_made(few: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    value = rpc.remote("w1", torch.ones, (2,))
    assert value.to_here().sum() == 2
    gate = Gate()
    running = [rpc.rpc_async("w1", gate.enter) for _ in range(2)]
    gate.wait_for(2)
    failed = on_event_loop(lambda: rpc.remote("w1", torch.ones, (3,)))
    with_reference = on_event_loop(lambda: rpc.rpc_async("w1", repr, (value,)))
    gate.open()
    for future in running:
        future.wait()
    for use in (failed.to_here, failed._get_future().wait, lambda: rpc.rpc_sync("w1", repr, (failed,))):
        for _ in range(2):
            with pytest.raises(Overloaded, match="max_in_flight: worker w1 has not replied") as raised:
                use()
            assert raised.value.limit == "max_in_flight"
    with pytest.raises(Overloaded, match="max_in_flight"):
        with_reference.wait()
    monkeypatch.setattr(rpc.RRef, "_check", lambda _: None)  # the creation fails after it
    with pytest.raises(Overloaded, match="max_in_flight"):
        failed.to_here()


def test_a_member_that_does_not_wait_for_replies_is_disconnected(
    few: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    running = [rpc.rpc_async("w1", gate.enter) for _ in range(2)]  # on both threads
    gate.wait_for(2)
    with RawPeer(few[1], "unix") as raw:
        assert raw.join(member(9, "flood")) == WELCOME
        most = 2 * 2 + 1024
        raw.send(b"".join(frame(REQUEST, b"x", tag=Tag.CALL, call=1 + i) for i in range(most)))
        eventually(lambda: few[1].debug_info().counts.queued_requests == most)
        raw.send(b"".join(frame(REQUEST, b"x", tag=Tag.CALL, call=5000 + i) for i in range(10)))
        raw.ended()
        assert few[1].debug_info().counts.queued_requests <= most
    gate.open()
    for future in running:
        future.wait()
    assert rpc.rpc_sync("w1", abs, (-3,)) == 3
    assert "max_in_flight: 2" in few[1]._worker.members.lost[9]
    eventually(lambda: few[1].debug_info().counts.queued_requests == 0)


# ---- send queues

MIB = 1 << 20
QUEUE = 8 * MIB


@pytest.fixture(params=["shm", "tcp"])
def actor_pair(request: Any, tmp_path: Path) -> Iterator[list[Actor]]:
    options = {"send_queue_bytes": QUEUE, "max_waiting_messages": 4, "transports": (request.param,)}
    with actors(2, tmp_path, **options) as group:
        yield group


def total(values: bytes) -> int:
    return len(values)


def send_from_event_loop(count: int, size: int) -> None:
    """Make calls where none may wait."""

    async def run() -> None:
        state["futures"] = [rpc.rpc_async("w1", total, (bytes(size),), timeout=0) for _ in range(count)]

    asyncio.run(run())


def results() -> list[str]:
    found = []
    for future in state["futures"]:
        try:
            found.append(str(future.wait()))
        except Overloaded as error:
            found.append(error.limit)
    return found


def limits_here() -> dict[str, Any]:
    return {name: (each.used, each.limit) for name, each in rpc.debug_info().limits.items()}


def test_a_callee_that_does_not_read(actor_pair: list[Actor]) -> None:
    caller, callee = actor_pair
    assert caller.do(call_many, "w1", 2) == 2
    callee.stop()
    caller.do(send_from_event_loop, 40, MIB)
    used, limit = caller.do(limits_here)["send_queue_bytes"]
    assert QUEUE // 2 < used <= limit == QUEUE
    callee.resume()
    found = caller.do(results)
    made = found.count(str(MIB))
    assert 4 <= made < 40
    assert found == [str(MIB)] * made + ["send_queue_bytes"] * (40 - made)
    assert caller.do(call_many, "w1", 2) == 2
    assert caller.do(limits_here)["send_queue_bytes"][0] == 0


# ---- messages that wait


def test_a_callee_that_cannot_be_reached(actor_pair: list[Actor]) -> None:
    caller, callee = actor_pair
    callee.stop()  # it has no connection yet, and accepts none
    caller.do(send_from_event_loop, 20, 1)
    used, limit = caller.do(limits_here)["max_waiting_messages"]
    assert used == limit == 4
    callee.resume()
    found = caller.do(results)
    made = found.count("1")
    assert 1 <= made <= 4
    assert found == ["1"] * made + ["max_waiting_messages"] * (20 - made)


def test_a_callee_that_cannot_be_reached_and_large_calls(tmp_path: Path) -> None:
    """Bytes that wait for a connection count, and are sent once it is open."""
    with actors(2, tmp_path, send_queue_bytes=MIB, transports=("tcp",)) as (caller, callee):
        callee.stop()  # it has no connection yet
        caller.do(send_from_event_loop, 100, MIB)  # any size may be the first
        used, limit = caller.do(limits_here)["send_queue_bytes"]
        assert limit == MIB <= used < 2 * MIB
        callee.resume()
        assert caller.do(results) == [str(MIB)] + ["send_queue_bytes"] * 99
        assert caller.do(call_many, "w1", 2) == 2
        assert caller.do(limits_here)["send_queue_bytes"][0] == 0


def enter(gate: Local[Gate]) -> str:
    gate.value.enter()
    return "text"


def test_requests_that_wait_for_a_reference() -> None:
    with cluster(2, rpc.Options(max_waiting_messages=2)) as group:
        gate = Gate()
        local = Local(gate)
        rref = rpc.remote("w1", enter, (local,))
        gate.wait_for()
        parked = [rref.rpc_async().upper() for _ in range(2)]
        eventually(lambda: group[1].debug_info().counts.parked_requests == 2)
        eventually(lambda: limit_of(group, 1, "max_waiting_messages").used == 2)
        with pytest.raises(Overloaded, match="max_waiting_messages") as raised:
            rref.rpc_sync().upper()
        assert raised.value.limit == "max_waiting_messages"
        gate.open()
        assert [future.wait() for future in parked] == ["TEXT", "TEXT"]
        assert rref.rpc_sync().upper() == "TEXT"
        eventually(lambda: limit_of(group, 1, "max_waiting_messages").used == 0)


# ---- objects of a message


LEAST = 65536  # of the option max_objects


def make(count: int) -> list[int]:
    return list(range(count))


@pytest.mark.parametrize(
    "value",
    [
        [[] for _ in range(LEAST + 1)],
        [1] * (LEAST + 1),
        dict.fromkeys(range(LEAST // 2 + 1)),
        {"a": [(str(i),) for i in range(LEAST // 2)]},
        [torch.empty(0) for _ in range(LEAST // 16 + 1)],
    ],
    ids=["lists", "numbers", "dict", "nested", "tensors"],
)
def test_arguments_of_many_objects(value: object) -> None:
    with cluster(2, rpc.Options(max_objects=LEAST)) as group:
        with pytest.raises(Overloaded, match="max_objects") as raised:
            rpc.rpc_sync("w1", type, (value,))
        assert raised.value.limit == "max_objects"
        assert rpc.rpc_sync("w1", len, (make(LEAST - 20),)) == LEAST - 20
        assert limit_of(group, 1, "max_objects").refused == 1
        assert LEAST - 20 < limit_of(group, 1, "max_objects").used <= LEAST


def test_results_of_many_objects() -> None:
    with cluster(2, rpc.Options(max_objects=LEAST)) as group:
        assert len(rpc.rpc_sync("w1", make, (LEAST - 1,))) == LEAST - 1
        with pytest.raises(Overloaded, match="max_objects"):
            rpc.rpc_sync("w1", make, (LEAST + 1,))
        with pytest.raises(Overloaded, match="max_objects"):
            rpc.rpc_async("w1", make, (LEAST + 1,)).wait()
        assert limit_of(group, 0, "max_objects").refused == 2


# ---- peers, references and contexts


def test_a_member_cannot_invent_workers_without_end() -> None:
    with cluster(2, reachable(max_peers=3)) as group:
        rpc.rpc_sync("w1", abs, (-1,))
        used = limit_of(group, 1, "max_peers").used
        answers = []
        for number in range(4):
            with RawPeer(group[1], "unix") as raw:
                answers.append(raw.join(member(20 + number, f"invented{number}")))
        assert answers == [WELCOME] * (3 - used) + [REFUSE] * (1 + used)
        assert limit_of(group, 1, "max_peers").used == 3
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1


def warnings(caplog: pytest.LogCaptureFixture, option: str) -> list[str]:
    return [text for record in caplog.records if option in (text := record.getMessage())]


def test_many_references_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(2, rpc.Options(warn_references=5)) as group:
        held = [rpc.remote("w1", abs, (-i,)) for i in range(5)]
        for rref in held:
            rref.to_here()
        assert warnings(caplog, "warn_references") == []
        held += [rpc.remote("w1", abs, (-i,)) for i in range(5)]
        for rref in held:
            rref.to_here()
        assert sorted(text.split()[1] for text in warnings(caplog, "warn_references")) == ["w0", "w1"]
        assert limit_of(group, 0, "warn_references") == limit_of(group, 1, "warn_references")
        assert limit_of(group, 0, "warn_references").used == 10
        del held, rref


def test_many_contexts_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(2, rpc.Options(warn_contexts=2)) as group, ExitStack() as stack:
        for count in range(1, 5):
            inside = copy_context()  # contexts of one thread do not nest
            context = autograd.context()
            inside.run(context.__enter__)
            stack.callback(inside.run, context.__exit__, None, None, None)
            inside.run(rpc.rpc_sync, "w1", torch.add, (torch.ones(2, requires_grad=True), 1))
            assert len(warnings(caplog, "warn_contexts")) == (2 if count > 2 else 0)
        assert limit_of(group, 1, "warn_contexts").used == 4


def test_a_name_that_a_peer_does_not_keep(caplog: pytest.LogCaptureFixture) -> None:
    """A member defines the last name that is kept, and one beyond."""
    with cluster(2, reachable()) as group:
        for number, survives in ((65537, True), (65538, False)):
            with RawPeer(group[1], "unix") as raw:
                assert raw.join(member(30 + number, "namer" + str(number))) == WELCOME
                raw.send(frame(REQUEST, b"nx", size=1, tag=Tag.CALL, name_id=number, name_size=1, call=1))
                if survives:
                    assert raw.receive_call()[:2] == (REPLY, 1)
                else:
                    raw.ended()
                    eventually(lambda: "65536 names" in group[1]._worker.members.lost.get(30 + 65538, ""))


# ---- all of them


def test_each_limit_is_shown() -> None:
    with cluster(2) as group:
        info = group[0].debug_info()
        options = {field.name for field in dataclasses.fields(rpc.Options)}
        without_option = {"interned_names": 65536, "unacknowledged_bytes": 4 << 20}
        expected = {name for name in options if name.startswith(("max_", "warn_"))}
        expected |= {"send_queue_bytes", "request_window_bytes", "arena_budget_bytes", "shared_memory_bytes"}
        assert info.limits.keys() == expected | {"retry_results_bytes"} | without_option.keys()
        for name, each in info.limits.items():
            assert each.limit == without_option.get(name, getattr(rpc.Options(), name, None))
            assert f"    {name}: {each.used} of {each.limit}" in str(info)


@pytest.mark.parametrize(
    "name",
    ["max_call_depth", "max_in_flight", "max_waiting_messages", "max_objects", "max_peers", "max_unauthenticated"],
)
@pytest.mark.parametrize("value", [0, 1 << 31, 2.5, True])
def test_values_of_options(name: str, value: object) -> None:
    if value is True:
        rpc.Options(**{name: LEAST if name == "max_objects" else 1})
        return
    with pytest.raises((TypeError, ValueError), match=name):
        rpc.Options(**{name: value})  # type: ignore[arg-type]
