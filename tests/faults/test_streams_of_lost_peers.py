"""Callers and callees of streams that are killed or stopped between two items.

The reader gets the loss with the name of the callee; the generator of a lost caller is closed. Nothing is left.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_helpers import LIMITS, LOST, check_clean, name_of_lost, on_both_signals, shut_down, strike
from process_helpers import TIMEOUT, Actor, actors, call_many, failure, state

from telegrad import rpc
from telegrad.testing import eventually

ITEMS = 3  # that arrive before the signal


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, rpc_timeout=0, **LIMITS) as group:
        yield group


# ---- generators, which note their end


def endless() -> Iterator[int]:
    """Yield numbers; the stream's limit holds it between two of them."""
    try:
        number = 0
        while True:
            yield number
            number += 1
    finally:
        state["ended"] = True


async def endless_async() -> AsyncIterator[int]:
    for number in endless():
        yield number
        await asyncio.sleep(0)


async def waiting_async() -> AsyncIterator[int]:
    """Wait after some items."""
    try:
        for number in range(ITEMS):
            yield number
        state["waits"] = True
        await asyncio.Event().wait()
    finally:
        state["ended"] = True


def waiting() -> Iterator[int]:
    """Wait after some items until the reader is gone."""
    try:
        yield from range(ITEMS)
        state["waits"] = True
        eventually(rpc.cancelled, timeout=TIMEOUT)
    finally:
        state["ended"] = True


def waits() -> bool:
    return bool(state.get("waits"))


def has_ended() -> bool:
    return bool(state.get("ended"))


# ---- readers


def read(to: str, function: Callable[..., Any]) -> None:
    for item in rpc.stream(to, function, timeout=0):
        state["read"] = item


def read_async(to: str, function: Callable[..., Any]) -> None:
    async def run() -> None:
        async for item in rpc.stream(to, function, timeout=0):
            state["read"] = item

    asyncio.run(run())


def items_read() -> int:
    return int(state.get("read", -1)) + 1


def open_stream(to: str, function: Callable[..., Any]) -> list[int]:
    """Read some items, and keep the stream open."""
    state["stream"] = rpc.stream(to, function, timeout=0)
    return [next(state["stream"]) for _ in range(ITEMS)]


def read_on() -> list[int]:
    return list(state["stream"])


def drop_stream() -> None:
    del state["stream"]


def check_others(*group: Actor) -> None:
    """Check that the workers reach each other and hold nothing, and shut them down."""
    for actor in group:
        for other in group:
            assert actor.do(call_many, other.name, 10) == 10
    check_clean(*group)
    shut_down(*group)


# ---- losses


@on_both_signals
@pytest.mark.parametrize("read", [read, read_async])
@pytest.mark.parametrize("function", [waiting, waiting_async])
def test_the_callee_of_a_stream_is_lost(
    function: Callable[..., Any], read: Callable[..., None], with_signal: signal.Signals, three: list[Actor]
) -> None:
    """The reader waits for an item.

    The generator of a stopped callee ends when the callee resumes.
    """
    reader, callee, bystander = three
    reading = reader.begin(name_of_lost, read, "w1", function)
    eventually(lambda: callee.do(waits) and reader.do(items_read) == ITEMS)
    assert not reading.is_over
    struck = strike(callee, with_signal)
    assert reading.result() == "w1"
    assert time.monotonic() - struck < LOST
    if with_signal == signal.SIGKILL:
        check_others(reader, bystander)
        return
    callee.resume()
    eventually(lambda: callee.do(has_ended))
    check_others(reader, callee, bystander)


@on_both_signals
@pytest.mark.parametrize("function", [endless, endless_async, waiting, waiting_async])
def test_the_caller_of_a_stream_is_lost(
    function: Callable[..., Any], with_signal: signal.Signals, three: list[Actor]
) -> None:
    """A stopped caller gets an error when it resumes.

    The error is the loss, or says that the callee has closed the stream.
    """
    callee, caller, bystander = three
    assert caller.do(open_stream, "w0", function) == list(range(ITEMS))
    assert not callee.do(has_ended)
    struck = strike(caller, with_signal)
    eventually(lambda: callee.do(has_ended), timeout=LOST)
    assert time.monotonic() - struck < LOST
    if with_signal == signal.SIGKILL:
        check_others(callee, bystander)
        return
    caller.resume()
    kind, text = caller.do(failure, read_on)
    assert kind in ("WorkerLost", "StreamError"), text
    assert "w0 is lost" in text or "is not open on worker w0" in text
    caller.do(drop_stream)
    check_others(callee, caller, bystander)
