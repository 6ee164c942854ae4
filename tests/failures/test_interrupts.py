"""Signals delivered to another thread interrupt waits of the main thread."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from telegrad import _core, autograd, rpc
from telegrad.group.store_waits import within
from telegrad.testing import Gate, assert_quiescent, cluster, eventually
from telegrad.waits import wait_for
from telegrad.worker import worker as worker_module

TIMEOUT = 20.0  # s


def codes(thread: int) -> list[CodeType]:
    """Return the code of a thread's frames, the innermost first."""
    frame: FrameType | None = _core.thread_frames()[thread]
    found = []
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return found


def waits(thread: int) -> bool:
    """Return whether a thread is in `wait_for`, and within that in Python's wait."""
    running = codes(thread)
    return running[0] is threading.Condition.wait.__code__ and wait_for.__code__ in running


@contextmanager
def interrupted_elsewhere(release: Callable[[], None]) -> Iterator[None]:
    """Interrupt the main thread's wait by a signal delivered to another thread."""
    main = threading.main_thread().ident
    assert main is not None
    failures: list[BaseException] = []

    def interrupt() -> None:
        try:
            eventually(lambda: waits(main), TIMEOUT)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            eventually(lambda: wait_for.__code__ not in codes(main), TIMEOUT, "the main thread notices")
        except BaseException as e:
            failures.append(e)
        finally:
            release()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("timeout", [None, 2 * TIMEOUT])
def test_a_wait_for_an_event(timeout: float | None) -> None:
    event = threading.Event()
    with interrupted_elsewhere(event.set):
        wait_for(event, timeout)


def test_results_of_waits() -> None:
    event = threading.Event()
    assert not wait_for(event, 0)
    assert not wait_for(event, 0.01)
    event.set()
    assert wait_for(event)
    assert wait_for(event, 0)


def test_a_use_of_an_unresponsive_store() -> None:
    event = threading.Event()
    with interrupted_elsewhere(event.set):
        within(2 * TIMEOUT, event.wait)


def enter(gate: Gate) -> None:
    try:
        gate.enter(timeout=2 * TIMEOUT)
    except TimeoutError:
        gate.open()  # the test sees that its wait has not ended before
        raise


def test_a_graceful_shutdown_with_a_handler_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_JOIN_TIMEOUT", 0.0)
    gate = Gate()
    worker = rpc.Worker("alone", 0, 1, store=HashStore())
    running = worker.rpc_async("alone", enter, (gate,))
    gate.wait_for()
    with interrupted_elsewhere(gate.open):
        worker.shutdown()
    assert worker._worker.closed
    with pytest.raises(RuntimeError):
        running.wait()


def test_a_value_that_is_being_created() -> None:
    gate = Gate()
    with rpc.Worker("alone", 0, 1, store=HashStore()) as worker:
        made = worker.remote("alone", enter, (gate,))
        gate.wait_for()
        with interrupted_elsewhere(gate.open):
            made.to_here()
        assert made.to_here() is None
        del made
        worker.shutdown()


# ---- waits for another worker


class Waits(torch.autograd.Function):
    """Identity whose backward enters a gate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        enter(ctx.gate)
        return gradients[0], None


def waiting(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    return Waits.apply(x, gate)  # type: ignore[no-any-return, no-untyped-call]


def run_backward(gate: Gate) -> None:
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync("w1", waiting, (x, gate)).sum()])


def iterate(gate: Gate) -> None:
    list(rpc.map(["w1"], enter, [gate]))


WAITS: dict[str, Callable[[Gate], object]] = {
    "rpc_sync": lambda gate: rpc.rpc_sync("w1", enter, (gate,)),
    "wait": lambda gate: rpc.rpc_async("w1", enter, (gate,)).wait(),
    "then": lambda gate: rpc.rpc_async("w1", enter, (gate,)).then(lambda done: done.value()).wait(),
    "wait_all": lambda gate: rpc.wait_all([rpc.rpc_async("w1", enter, (gate,))]),
    "wait_all of then": lambda gate: rpc.wait_all(
        [rpc.rpc_async("w1", enter, (gate,)).then(torch.futures.Future.value)]
    ),
    "to_here": lambda gate: rpc.remote("w1", enter, (gate,)).to_here(),
    "backward": run_backward,
    "map": iterate,
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_wait_for_another_worker(wait: Callable[[Gate], object], transport: str) -> None:
    """The signal comes while the other worker is busy with it; both go on."""
    with cluster(2, rpc.Options(transports=(transport,))) as group:
        gate = Gate()

        def interrupt() -> None:
            gate.wait_for()
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            wait(gate)
        thread.join()
        assert not gate.is_open(), "the reply has not ended the wait"
        gate.open()
        assert rpc.rpc_sync("w1", abs, (-1,)) == group[1].rpc_sync("w0", abs, (-1,)) == 1
        for worker in group:
            assert_quiescent(worker)


def test_the_pause_of_a_retry() -> None:
    retry = rpc.Retry(attempts=2, backoff=2 * TIMEOUT, max_backoff=2 * TIMEOUT, jitter=False, on=(ValueError,))
    with cluster(2) as group:
        with interrupted_elsewhere(lambda: None):
            rpc.rpc_sync("w1", int, ("no number",), retry=retry)
        for worker in group:
            assert_quiescent(worker)


def test_a_call_that_waits_for_the_window_while_completions_are_deferred() -> None:
    command = [sys.executable, str(Path(__file__).with_name("interrupted_program.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted 30\n"), done.stderr
