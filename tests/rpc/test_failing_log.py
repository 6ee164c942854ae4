"""Handlers of the program's log that raise: a caller gets its reply all the same."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd.consistency.saved_tensors import protect
from telegrad.errors import SerializationError
from telegrad.testing import Cluster, eventually

pytestmark = pytest.mark.usefixtures("two")

TIMEOUT = 10  # s


class Raises(logging.Handler):
    """Handler whose every record raises."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind

    def emit(self, record: logging.LogRecord) -> None:
        raise self.kind("the log is full")


@pytest.fixture(params=[OSError, SystemExit])
def full_log(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level("INFO", "telegrad.remote")
    logger, handler = logging.getLogger("telegrad.remote"), Raises(request.param)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


def fail() -> None:
    raise KeyError("on purpose")


async def fail_later() -> None:
    await asyncio.sleep(0)
    raise KeyError("on purpose")


def generator() -> Iterator[int]:
    yield 1


WAYS: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "call": (lambda: rpc.rpc_sync("w1", fail, timeout=TIMEOUT), KeyError),
    "coroutine": (lambda: rpc.rpc_sync("w1", fail_later, timeout=TIMEOUT), KeyError),
    "creation": (lambda: rpc.remote("w1", fail).to_here(timeout=TIMEOUT), KeyError),
    "result": (lambda: rpc.rpc_sync("w1", generator, timeout=TIMEOUT), SerializationError),
}


@pytest.mark.usefixtures("full_log", "clean")
@pytest.mark.parametrize("way", WAYS)
def test_the_caller_gets_the_error(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    call, kind = WAYS[way]
    with pytest.raises(kind):
        call()
    assert rpc.rpc_sync("w1", abs, (-1,)) == 1
    said = capfd.readouterr().err
    assert said.startswith("worker w1 cannot log an error of a call: ")
    assert "the log is full" in said


@pytest.fixture
def failing_log() -> Iterator[None]:
    logger, handler = logging.getLogger("telegrad"), Raises(OSError)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.mark.usefixtures("failing_log")
def test_threads_outlive_an_internal_error_that_cannot_be_logged(
    two: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = two[0]._worker
    worker.timers.call_later(0, fail)
    worker.pool.submit(fail)
    came = [threading.Event(), threading.Event()]
    worker.timers.call_later(0, came[0].set)
    worker.pool.submit(came[1].set)
    assert all(each.wait(TIMEOUT) for each in came)
    said = ""

    def is_complete() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return said.count("OSError: the log is full") == 2

    eventually(is_complete)
    threads = worker.pool.threads()
    assert all(thread.is_alive() for thread in threads)
    assert "internal error in a timer of telegrad-w0-timers, which cannot be logged: " in said
    assert "a pool thread of w0 failed with an internal error, which cannot be logged: " in said
    worker.timers.call_later(0, came[0].clear)
    eventually(lambda: not came[0].is_set())


def fail_with(x: Tensor) -> None:
    raise KeyError(len(x))


def test_a_handler_leaves_the_gate_of_steps_without_a_reply(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    step_gate = protect(two[1]._worker).gate
    inside: list[int] = []

    def refuse(*_: object) -> None:
        inside.append(step_gate.handlers)
        raise MemoryError("on purpose")

    monkeypatch.setattr(two[1]._worker.handlers, "fail", refuse)
    with autograd.context():
        future = rpc.rpc_async("w1", fail_with, (torch.ones(2, requires_grad=True),))
        eventually(lambda: inside == [1])
        eventually(lambda: step_gate.handlers == 0)
        future.cancel()
