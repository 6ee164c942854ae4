"""Many calls, threads, chains, references and contexts at once: all are right."""

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from fault_helpers import check_clean, shut_down
from process_helpers import TIMEOUT, Actor, actors, call_many, state

from telegrad import autograd, rpc
from telegrad.testing import run_all

pytestmark = pytest.mark.slow

UNAWAITED = 20_000
THREADS, CALLS = 64, 50
MADE, HELD = 5_000, 500
CONTEXTS = 300
MIB = 1 << 20


@pytest.fixture(params=["shm", "tcp"])
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Actor]]:
    options = {"transports": (request.param,), "num_worker_threads": 2, "max_call_depth": 128}
    with actors(3, tmp_path, rpc_timeout=TIMEOUT, **options) as group:
        yield group


# ---- steps


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


def call_without_waiting(to: str) -> int:
    """Make all calls before the first wait; return the number of correct results."""
    futures = [rpc.rpc_async(to, int.__neg__, (number,)) for number in range(UNAWAITED)]
    return sum(future.wait() == -number for number, future in enumerate(futures))


def call_from_threads(to: str) -> int:
    begin = threading.Barrier(THREADS)

    def run() -> int:
        begin.wait(TIMEOUT)
        return call_many(to, CALLS)

    return sum(run_all([run] * THREADS))


def descend(depth: int) -> int:
    """Return the depth, by a chain of calls around the workers."""
    if depth == 0:
        return 0
    following = (rpc.get_worker_info().id + 1) % 3
    return 1 + int(rpc.rpc_sync(following, descend, (depth - 1,)))


def descend_at_once(chains: int, depth: int) -> list[int]:
    return run_all([lambda: descend(depth)] * chains)


def make_references(to: str, count: int) -> int:
    """Make references and drop each; return the number of correct values."""
    return sum(rpc.remote(to, int.__neg__, (number,)).to_here() == -number for number in range(count))


def hold_references(to: str, count: int) -> int:
    state["held"] = [rpc.remote(to, int.__neg__, (number,)) for number in range(count)]
    return sum(held.to_here() == -number for number, held in enumerate(state["held"]))


def drop_references() -> None:
    del state["held"]


class Fails(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *_: torch.Tensor) -> torch.Tensor:
        raise KeyError("in backward")


def fails_later(x: torch.Tensor) -> torch.Tensor:
    return Fails.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def fails_now(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("in forward")


def fail_in_contexts(to: str, count: int) -> dict[str, int]:
    """Raise an error in each context; return how often each has arrived."""
    arrived = {"'in forward'": 0, "'in backward'": 0, "'here'": 0}
    for number in range(count):
        try:
            with autograd.context() as context_id:
                x = torch.ones(2, requires_grad=True)
                y = rpc.rpc_sync(to, fails_now if number % 3 == 0 else fails_later, (x,))
                if number % 3 == 1:
                    raise KeyError("here")
                autograd.backward(context_id, [y.sum()])
        except KeyError as e:
            arrived[str(e).splitlines()[0]] += 1
    return arrived


# ---- tests


def test_calls_that_no_thread_waits_for(three: list[Actor]) -> None:
    """Another caller of the same worker is served in between."""
    caller, callee, other = three
    assert caller.do(call_many, "w1", 10) == other.do(call_many, "w1", 10) == 10
    before = [actor.do(memory) for actor in (caller, callee)]
    many = caller.begin(call_without_waiting, "w1")
    turns = 0
    while not many.is_over:
        assert other.do(call_many, "w1", 10) == 10
        turns += 1
    assert many.result() == UNAWAITED
    assert turns > 1
    for actor, size in zip((caller, callee), before, strict=True):
        assert actor.do(memory) - size < 128 * MIB
    check_clean(*three)
    shut_down(*three)


def test_calls_of_many_threads(three: list[Actor]) -> None:
    caller, callee, _ = three
    both = caller.begin(call_from_threads, "w1"), callee.begin(call_from_threads, "w0")
    assert [step.result() for step in both] == [THREADS * CALLS] * 2
    check_clean(*three)
    shut_down(*three)


def test_deep_chains_over_workers_with_few_threads(three: list[Actor]) -> None:
    first, second, _ = three
    assert first.do(descend, 100) == 100
    both = [actor.begin(descend_at_once, 12, 40) for actor in (first, second)]
    assert [step.result() for step in both] == [[40] * 12] * 2
    check_clean(*three)
    shut_down(*three)


def test_many_references(three: list[Actor]) -> None:
    """Neither those that were dropped nor those that are held at once leave anything."""
    first, owner, _ = three
    assert first.do(make_references, "w1", MADE) == MADE
    before = [actor.do(memory) for actor in (first, owner)]
    assert first.do(make_references, "w1", MADE) == MADE
    assert first.do(hold_references, "w1", HELD) == HELD
    first.do(drop_references)
    check_clean(*three)
    for actor, size in zip((first, owner), before, strict=True):
        assert actor.do(memory) - size < 16 * MIB
    shut_down(*three)


def test_many_contexts_with_an_error_inside(three: list[Actor]) -> None:
    first, _, _ = three
    third = CONTEXTS // 3
    assert first.do(fail_in_contexts, "w1", CONTEXTS) == {
        "'in forward'": third,
        "'in backward'": third,
        "'here'": third,
    }
    check_clean(*three)
    shut_down(*three)
