"""Multicasts that a signal handler interrupts: what they have sent is canceled."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from test_interrupted_sends import Alarm, Timer, interrupted

from telegrad import rpc
from telegrad.options import Options
from telegrad.testing import Cluster, Gate, assert_quiescent, cluster, eventually
from telegrad.worker.calls import multicast

WINDOW = 1 << 16  # bytes
LARGE = torch.ones(WINDOW // 4)


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    with cluster(3, Options(num_worker_threads=1, request_window_bytes=WINDOW)) as group:
        yield group


@pytest.fixture
def group(workers: Cluster) -> Iterator[Cluster]:
    yield workers
    for worker in workers:
        assert_quiescent(worker)


def all_are_canceled(group: Cluster, what: str = "the cancellation") -> None:
    engines = [worker._worker.engine for worker in group]
    eventually(lambda: not any(engine.stats()["pending_calls"] for engine in engines), what=what)
    eventually(lambda: not any(engine.stats()["running_requests"] for engine in engines), what=what)


def until_canceled(*_: object) -> None:
    eventually(rpc.cancelled)


def raise_signal(_: torch.Tensor) -> None:
    if rpc.get_worker_info().name == "w1":
        os.kill(os.getpid(), signal.SIGUSR1)
    eventually(rpc.cancelled)


@pytest.mark.parametrize("kind", [Alarm, Timer])
def test_what_has_been_sent_is_canceled_if_a_window_is_full(group: Cluster, kind: type[BaseException]) -> None:
    """The signal arrives while the request for w2 waits."""

    def on_signal(*_: object) -> None:
        raise kind

    gate = Gate()
    held = rpc.rpc_async("w2", gate.enter)
    gate.wait_for()
    waiting = rpc.rpc_async("w2", gate.enter, (LARGE,))
    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        with pytest.raises(kind):
            rpc.multicast(("w2", "w1"), raise_signal, (LARGE,), timeout=0)
        engine = group[1]._worker.engine
        eventually(lambda: not engine.stats()["running_requests"], what="the cancellation on w1")
    finally:
        signal.signal(signal.SIGUSR1, before)
        gate.open()
    rpc.wait_all([held, waiting])


@pytest.mark.parametrize("to", [("w1", "w2"), ("w1",)])
def test_what_has_been_sent_is_canceled(group: Cluster, to: tuple[str, ...]) -> None:
    def begin_and_cancel() -> None:
        for future in rpc.multicast(to, until_canceled, timeout=0):
            future.cancel()

    functions = (multicast._call_each, multicast._call_all)
    for at in interrupted(begin_and_cancel, *functions):
        all_are_canceled(group, f"the cancellation at step {at}")
