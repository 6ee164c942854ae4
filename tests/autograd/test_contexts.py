"""Begin and end of contexts on one and several workers."""

import asyncio
import contextvars
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.autograd import api
from telegrad.autograd.context import Context
from telegrad.autograd.contexts import ID_BITS, Contexts
from telegrad.errors import RpcTimeout
from telegrad.testing import Cluster, cluster, eventually


def table(worker: Any) -> dict[int, Context]:
    return worker._worker.autograd.contexts.table  # type: ignore[no-any-return]


def late(worker: Any) -> dict[int, Any]:
    return worker._worker.autograd.contexts.tombstones  # type: ignore[no-any-return]


def assert_no_contexts(group: Cluster) -> None:
    eventually(lambda: not any(table(worker) or late(worker) for worker in group))


def here() -> int | None:
    scope = rpc.api.current.get()
    return None if scope is None or scope.autograd is None else scope.autograd.id


# ---- in one worker


def test_ids_name_the_worker_and_count(four: Cluster) -> None:
    with four[1]:
        ids = []
        for _ in range(3):
            with autograd.context() as context_id:
                assert api._retrieve_context(context_id)._context_id() == context_id == here()
                ids.append(context_id)
        assert [i >> ID_BITS for i in ids] == [1, 1, 1]
        assert ids == sorted(set(ids))
        assert here() is None
        assert api._get_max_id() == (2 << ID_BITS) - 1
        for context_id in ids:
            with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
                api._retrieve_context(context_id)


def test_a_thread_has_one_context_at_a_time(four: Cluster) -> None:
    with autograd.context() as context_id:
        with pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"):
            autograd.context().__enter__()
        assert here() == context_id
        seen: list[int | None] = []

        def other() -> None:
            with four[0]:
                seen.append(here())
                with autograd.context():
                    seen.append(here())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen[0] is None
        assert seen[1] not in (None, context_id)
    with autograd.context():  # and after it another
        pass


def test_coroutines_have_separate_contexts(four: Cluster) -> None:
    async def one(gate: asyncio.Event, mine: asyncio.Event) -> tuple[int, int | None]:
        with autograd.context() as context_id:
            mine.set()
            await gate.wait()
            return context_id, here()

    async def both() -> Any:
        first, second = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(one(first, second), one(second, first))

    (a, seen_a), (b, seen_b) = asyncio.run(both())
    assert a == seen_a != b == seen_b


def test_private_functions_to_enter_and_leave(four: Cluster) -> None:
    with pytest.raises(RuntimeError, match="Current thread doesn't have a valid autograd context"):
        api._current_context()
    opened = api._new_context()
    assert api._current_context()._context_id() == opened._context_id() == here()
    api._is_valid_context(opened._context_id())
    assert api._get_debug_info() == {"num_current_backward_passes": 0, "num_autograd_contexts": 1}
    api._release_context(opened._context_id())
    assert here() is None
    for call in (api._is_valid_context, api._release_context, autograd.get_gradients):
        with pytest.raises(RuntimeError, match="Could not find autograd context"):
            call(opened._context_id())


def test_without_a_group() -> None:
    with pytest.raises(RuntimeError, match="Need to initialize distributed autograd"):
        contextvars.Context().run(autograd.context().__enter__)
    assert autograd.is_available()
    with pytest.raises(ValueError, match="worker_id needs to be in the range"):
        api._init(1 << 16)


def test_a_context_that_was_never_sent_sends_no_end(four: Cluster) -> None:
    rpc.rpc_sync("w1", int)
    engine = four[0]._worker.engine
    before = engine.stats()["sent_messages"]
    for _ in range(1000):
        with autograd.context():
            pass
    assert engine.stats()["sent_messages"] == before
    assert not table(four[0])


# ---- on several


def hop(*way: str) -> list[int | None]:
    """Return the contexts along a chain of nested calls."""
    return [here(), *(rpc.rpc_sync(way[0], hop, way[1:]) if way else [])]


def test_handlers_run_in_the_context_of_their_caller(four: Cluster) -> None:
    with autograd.context() as context_id:
        assert rpc.rpc_sync("w1", hop, ("w2", "w3", "w0")) == [context_id] * 4
        assert rpc.rpc_async("w1", here).wait() == context_id
        assert rpc.remote("w1", here).to_here() == context_id
        assert rpc.rpc_async("w1", int).then(lambda _: here()).wait() == context_id
        assert [set(table(worker)) for worker in four] == [{context_id}] * 4
        assert api._current_context()._known_worker_ids() == {1}
    assert rpc.rpc_sync("w1", here) is None
    assert_no_contexts(four)


def test_other_workers_of_the_process_are_outside(four: Cluster) -> None:
    with autograd.context() as context_id:
        with four[1]:
            assert here() is None
            with autograd.context() as other:
                assert other >> ID_BITS == 1
        with four[0]:
            assert here() == context_id
        assert four[1].rpc_sync("w0", here) is None


def test_concurrent_contexts_are_separate(four: Cluster) -> None:
    def run(rank: int) -> None:
        for _ in range(50):
            with autograd.context() as context_id:
                assert rpc.rpc_sync(f"w{(rank + 1) % 4}", hop, (f"w{rank}",)) == [context_id] * 2

    four.on_each(run)
    assert_no_contexts(four)


_gate = threading.Event()


def slow(way: str) -> list[int | None]:
    assert _gate.wait(20)
    return hop(way)


def test_a_late_reply_is_not_recorded(four: Cluster) -> None:
    _gate.clear()
    with autograd.context(), pytest.raises(RpcTimeout):
        rpc.rpc_sync("w1", slow, ("w2",), timeout=0.05)
    eventually(lambda: not table(four[1]))
    _gate.set()
    eventually(lambda: not four[1]._worker.engine.stats()["running_requests"])
    assert_no_contexts(four)


def test_contexts_of_a_lost_worker_are_removed() -> None:
    with cluster(3, current=None) as group:
        with group[2]:
            begun = api._new_context()
            rpc.rpc_sync("w1", hop, ("w0",))
        with group[0], autograd.context() as mine:
            rpc.rpc_sync("w1", hop, ("w2",))
            assert [len(table(worker)) for worker in group] == [2, 2, 2]
            lost = group.workers.pop(2)
            with lost:
                assert begun._context.id in table(group[0])
            lost.shutdown(graceful=False)
            eventually(lambda: [set(table(worker)) for worker in group] == [{mine}] * 2)
            eventually(lambda: api._current_context()._known_worker_ids() == {1})
            assert not table(lost)
        assert_no_contexts(group)


# ---- the counts, in every order


class World:
    """Tables of contexts, with messages between them that arrive in any order."""

    def __init__(self, workers: int, choice: random.Random) -> None:
        self.choice = choice
        self.under_way: list[Callable[[], None]] = []
        self.tables = [
            Contexts(
                me, 0, lambda peer, word, epoch, me=me: self.notify(me, peer, word), lambda *_: None, lambda _: True
            )  # type: ignore[misc]
            for me in range(workers)
        ]

    def notify(self, me: int, peer: int, word: tuple[int, int]) -> None:
        self.under_way.append(lambda: self.tables[peer].on_ended(me, *word, 1))

    def call(self, me: int, context: Context, depth: int) -> None:
        """Send a request to a random worker; its handler makes more requests."""
        peer = self.choice.randrange(len(self.tables))
        if self.tables[me].on_send(context, peer, (), True) is None:
            return

        def handle() -> None:
            there = self.tables[peer].on_request(context.id, me, 1)
            if there is not None:
                for _ in range(self.choice.randrange(3) if depth else 0):
                    self.under_way.append(lambda: self.call(peer, there, depth - 1))

        self.under_way.append(handle)

    def step(self) -> None:
        self.under_way.pop(self.choice.randrange(len(self.under_way)))()


@pytest.mark.parametrize("seed", range(300))
def test_late_messages_leave_no_context(seed: int) -> None:
    choice = random.Random(seed)
    world = World(choice.choice((2, 3, 4)), choice)
    opened = []
    for root in range(len(world.tables)):
        context = world.tables[root].open()
        opened.append(context)
        for _ in range(choice.randrange(1, 5)):
            world.call(root, context, 3)
    while world.under_way or opened:
        if opened and (not world.under_way or choice.random() < 0.1):
            context = opened.pop()
            world.tables[context.id >> ID_BITS].end(context)
        else:
            world.step()
    for contexts in world.tables:
        assert not contexts.table
        assert not contexts.tombstones


def test_a_request_after_the_end_creates_no_context() -> None:
    notices: list[tuple[int, Any]] = []
    me = Contexts(1, 0, lambda peer, word, epoch: notices.append((peer, word)), lambda *_: None, lambda _: True)
    me.on_ended(0, 7, 2, 1)
    assert me.on_request(7, 0, 1) is None
    assert me.tombstones == {7: {0: 1}}
    assert me.on_request(7, 0, 1) is None
    assert not me.tombstones
    assert not notices


def test_an_end_is_forwarded_once() -> None:
    notices: list[tuple[int, Any]] = []
    me = Contexts(1, 0, lambda peer, word, epoch: notices.append((peer, word)), lambda *_: None, lambda _: True)
    context = me.on_request(7, 0, 1)
    assert context is not None
    assert me.on_send(context, 2, (), True) == 0
    assert me.on_request(7, 2, 1) is context
    me.on_ended(0, 7, 1, 1)
    assert notices == [(2, (7, 1))]
    assert me.on_send(context, 2, (), True) is None
    assert me.tombstones == {7: {2: -1}}, "worker 2 will say how many requests it has sent"
    me.on_ended(2, 7, 1, 1)
    assert not me.tombstones
    assert len(notices) == 1


def test_tombstones_are_bounded() -> None:
    me = Contexts(1, 0, lambda *_: None, lambda *_: None, lambda _: True)
    for context_id in range(10_000):
        me.on_ended(0, context_id, 1, 1)
    assert len(me.tombstones) <= 4096
    me.peer_lost(0, 1)
    assert not me.tombstones


@pytest.mark.slow
def test_a_million_contexts_leave_memory_flat(four: Cluster) -> None:
    def rss() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def many(n: int) -> None:
        x = torch.ones(2, requires_grad=True)
        for i in range(n):
            with autograd.context():
                if i % 100 == 0:
                    rpc.rpc_sync("w1", torch.add, (x, 1))

    many(20_000)
    before = rss()
    many(1_000_000)
    assert rss() - before < 4 << 20
    assert_no_contexts(four)
