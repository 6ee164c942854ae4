"""Streams of killed workers end on the other side."""

from pathlib import Path
from typing import Any

import pytest
from process_helpers import TIMEOUT, actors, state

from telegrad import rpc
from telegrad.errors import WorkerLost
from telegrad.rpc.api import _worker
from telegrad.streams.service import Streams
from telegrad.testing import eventually


def endless() -> Any:
    state["closed"] = False
    try:
        while True:
            yield 1
    finally:
        state["closed"] = True


async def endless_async() -> Any:
    state["closed"] = False
    try:
        while True:
            yield 1
    finally:
        state["closed"] = True


def open_stream(kind: str) -> int:
    state["stream"] = rpc.stream("w1", {"endless": endless, "endless_async": endless_async}[kind], timeout=TIMEOUT)
    return int(next(state["stream"]))


def read_to_the_loss() -> str:
    try:
        for _ in state["stream"]:
            pass
    except WorkerLost as e:
        return e.name
    return "the stream ended"


def wait_until_closed() -> None:
    eventually(lambda: state.get("closed"), TIMEOUT)
    assert not Streams.of(_worker()).producers


@pytest.mark.parametrize("kind", ["endless", "endless_async"])
def test_a_killed_caller(kind: str, tmp_path: Path) -> None:
    with actors(2, tmp_path) as workers:
        first, second = workers
        assert first.do(open_stream, kind) == 1
        first.end()
        second.do(wait_until_closed)


def test_a_killed_callee(tmp_path: Path) -> None:
    with actors(2, tmp_path) as workers:
        first, second = workers
        assert first.do(open_stream, "endless") == 1
        reading = first.begin(read_to_the_loss)
        second.end()
        assert reading.result() == "w1"
