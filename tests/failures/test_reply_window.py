"""Replies to a caller that does not read cost the callee little memory."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from process_helpers import TIMEOUT, Actor, actors, call_many, state

from telegrad import rpc
from telegrad.testing import eventually

CALLS = 300
MIB = 1 << 20
WINDOW = 16 * MIB


@pytest.fixture(params=["shm", "tcp"])
def two(request: Any, tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, transports=(request.param,), request_window_bytes=WINDOW, num_worker_threads=2) as group:
        yield group


may_answer = threading.Event()


def answer(number: int) -> torch.Tensor:
    assert may_answer.wait(TIMEOUT)
    return torch.full((MIB // 4,), float(number))


def ask() -> None:
    state["results"] = [rpc.rpc_async("w1", answer, (number,), timeout=0) for number in range(CALLS)]


def have_all_arrived() -> bool:
    return int(rpc.api._get_current_rpc_agent().worker.engine.stats()["requests"]) >= CALLS


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


def begin_to_answer() -> None:
    may_answer.set()


def is_idle() -> bool:
    stats = rpc.api._get_current_rpc_agent().worker.engine.stats()
    return bool(stats["running_handlers"] == 0 and stats["queued_requests"] > 0)


def number_of_correct_results() -> int:
    return sum(bool((result.wait() == number).all()) for number, result in enumerate(state["results"]))


def test_replies_to_a_stopped_caller_wait_with_their_requests(two: list[Actor]) -> None:
    caller, callee, other = two
    caller.do(call_many, "w1", 2)
    caller.do(ask)
    eventually(lambda: callee.do(have_all_arrived))
    assert caller.process.pid is not None
    os.kill(caller.process.pid, signal.SIGSTOP)
    before = callee.do(memory)
    callee.do(begin_to_answer)
    eventually(lambda: callee.do(is_idle))
    assert callee.do(memory) - before < 4 * WINDOW, f"of {CALLS} MiB"
    assert other.do(call_many, "w1", 10) == 10
    os.kill(caller.process.pid, signal.SIGCONT)
    assert caller.do(number_of_correct_results) == CALLS
