"""Replies to a caller that does not read cost the callee little memory."""

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from process_helpers import TIMEOUT, Actor, actors, call_many, state

from telegrad import rpc
from telegrad.testing import eventually

MIB = 1 << 20


class Flood(NamedTuple):
    """Replies of 1 MiB to a caller that does not read."""

    transport: str
    replies: int
    window: int  # bytes
    most: int  # bytes that they may cost the callee


FLOODS = [
    *(Flood(transport, 300, 16 * MIB, 64 * MIB) for transport in ("shm", "tcp")),
    *(
        pytest.param(Flood(transport, 3000, 64 * MIB, 200_000_000), marks=pytest.mark.slow)  # the default window
        for transport in ("shm", "tcp")
    ),
]


@pytest.fixture(params=FLOODS, ids=lambda flood: f"{flood.transport}, {flood.replies}")
def flood(request: Any) -> Flood:
    assert isinstance(request.param, Flood)
    return request.param


@pytest.fixture
def two(flood: Flood, tmp_path: Path) -> Iterator[list[Actor]]:
    options = {"transports": (flood.transport,), "request_window_bytes": flood.window}
    with actors(3, tmp_path, num_worker_threads=2, **options) as group:
        yield group


may_answer = threading.Event()


def answer(number: int) -> torch.Tensor:
    assert may_answer.wait(TIMEOUT)
    return torch.full((MIB // 4,), float(number))


def ask(replies: int) -> None:
    state["results"] = [rpc.rpc_async("w1", answer, (number,), timeout=0) for number in range(replies)]


def have_all_arrived(replies: int) -> bool:
    return int(rpc.api._get_current_rpc_agent().worker.engine.stats()["requests"]) >= replies


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


def begin_to_answer() -> None:
    may_answer.set()


def is_idle() -> bool:
    stats = rpc.api._get_current_rpc_agent().worker.engine.stats()
    return bool(stats["running_handlers"] == 0 and stats["queued_requests"] > 0)


def number_of_correct_results() -> int:
    results = deque(state.pop("results"))
    return sum(bool((results.popleft().wait() == number).all()) for number in range(len(results)))


def test_replies_to_a_stopped_caller_wait_with_their_requests(two: list[Actor], flood: Flood) -> None:
    caller, callee, other = two
    caller.do(call_many, "w1", 2)
    caller.do(ask, flood.replies)
    eventually(lambda: callee.do(have_all_arrived, flood.replies))
    caller.stop()
    before = callee.do(memory)
    callee.do(begin_to_answer)
    eventually(lambda: callee.do(is_idle))
    assert callee.do(memory) - before < flood.most, f"of {flood.replies} MiB"
    assert other.do(call_many, "w1", 10) == 10
    caller.resume()
    assert caller.do(number_of_correct_results) == flood.replies
