"""Steps with plain backward passes, and what docs/optim.md guarantees then."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parameter_server_helpers import Descent
from torch import Tensor, nn, optim

from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer
from telegrad.optim.local import LocalOptimizer
from telegrad.options import Options
from telegrad.rpc import RRef
from telegrad.testing import Cluster, Gate, assert_quiescent, cluster, eventually, run_all

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    """Start the trainers w0 and w2, and the server w1."""
    with cluster(3, options=Options(plain_backward=True)) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_left(w: Cluster) -> Iterator[None]:
    yield
    for worker in w:
        assert_quiescent(worker)


class Holder:
    """Parameter on the server, with a call that tests can block."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.full((3,), 3.0))

    def parameter(self) -> RRef[nn.Parameter]:
        return RRef(self.weight)

    def sum(self) -> Tensor:
        return self.weight.sum()

    def twice(self, gate: Gate) -> tuple[list[float], list[float]]:
        """Read the parameter before and after a pause."""
        before = self.weight.tolist()
        gate.enter()
        return before, self.weight.tolist()


def step_gate(w: Cluster) -> Any:
    return w[1]._worker.attachments["autograd.protection"].gate


@pytest.mark.parametrize("cls", [optim.SGD, Descent])
def test_a_step_waits_for_handlers_outside_of_contexts(w: Cluster, cls: Any) -> None:
    holder = rpc.remote("w1", Holder)
    optimizer = DistributedOptimizer(cls, [holder.rpc_sync().parameter()], lr=1.0)
    holder.rpc_sync().sum().backward()  # type: ignore[no-untyped-call]
    gate = Gate()
    reading = holder.rpc_async().twice(gate)
    gate.wait_for()

    def step() -> None:
        with w[0]:
            optimizer.step()

    def release() -> None:
        eventually(lambda: step_gate(w).waiting, what="a step that waits")
        gate.open()

    run_all([step, release])
    before, after = reading.wait()
    assert before == after == [3.0] * 3
    assert holder.rpc_sync().sum().item() == 6.0


@pytest.mark.parametrize("in_context", [False, True])
def test_a_step_does_not_wait_for_the_handler_of_another_step(
    w: Cluster, in_context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = rpc.remote("w1", Holder)
    optimizers = [DistributedOptimizer(optim.SGD, [holder.rpc_sync().parameter()], lr=1.0) for _ in range(2)]
    gate, step_part = Gate(), LocalOptimizer.step

    def step_later(self: LocalOptimizer, *args: Any, **kwargs: Any) -> None:
        gate.enter()
        step_part(self, *args, **kwargs)

    monkeypatch.setattr(LocalOptimizer, "step", step_later)

    def train(optimizer: DistributedOptimizer) -> None:
        with w[0]:
            if in_context:
                with autograd.context() as context_id:
                    autograd.backward(context_id, [holder.rpc_sync().sum()])
                    optimizer.step(context_id)
            else:
                optimizer.step()

    def release() -> None:
        gate.wait_for(2)  # the handlers of both steps run
        gate.open()

    holder.rpc_sync().sum().backward()  # type: ignore[no-untyped-call]
    run_all([lambda: train(optimizers[0]), lambda: train(optimizers[1]), release], timeout=15.0)
    assert holder.rpc_sync().sum().item() == 3.0


def test_calls_that_overlap_do_not_delay_a_step(w: Cluster) -> None:
    holder = rpc.remote("w1", Holder)
    optimizer = DistributedOptimizer(optim.SGD, [holder.rpc_sync().parameter()], lr=1.0)
    holder.rpc_sync().sum().backward()  # type: ignore[no-untyped-call]
    first, second = Gate(), Gate()
    reading = holder.rpc_async().twice(first)
    first.wait_for()
    results: list[tuple[list[float], list[float]]] = []

    def step() -> None:
        with w[0]:
            optimizer.step()
        second.wait_for()  # the later handler is still inside: the step has not waited for it
        second.open()

    def read_again() -> None:
        eventually(lambda: step_gate(w).waiting, what="a step that waits")
        with w[2]:
            later = holder.rpc_async().twice(second)
            eventually(lambda: step_gate(w).queued, what="a handler that waits")
            first.open()
            results.append(later.wait())

    run_all([step, read_again], timeout=15.0)
    assert reading.wait() == ([3.0] * 3, [3.0] * 3)
    assert results == [([2.0] * 3, [2.0] * 3)]


class Stepper:
    """Handlers on the server that step an optimizer of its parameter."""

    optimizer: DistributedOptimizer
    gate: Gate

    @staticmethod
    def step() -> None:
        """Step at the same time as the other handlers."""
        Stepper.gate.enter()
        Stepper.optimizer.step()

    @staticmethod
    def step_elsewhere() -> None:
        """Have another worker step the parameter of this one."""
        rpc.rpc_sync("w2", Stepper.step_by_message)

    @staticmethod
    def step_by_message() -> None:
        Stepper.optimizer.step()

    @staticmethod
    def call_back() -> None:
        """Step in a handler below this one, on another thread of this worker."""
        rpc.rpc_sync("w2", Stepper.call_server)

    @staticmethod
    def call_server() -> None:
        rpc.rpc_sync("w1", Stepper.step_by_message)


@contextmanager
def stepper() -> Iterator[Any]:
    """Return the holder of the parameter that `Stepper` steps."""
    holder = rpc.remote("w1", Holder)
    Stepper.optimizer = DistributedOptimizer(optim.SGD, [holder.rpc_sync().parameter()], lr=1.0)
    holder.rpc_sync().sum().backward()  # type: ignore[no-untyped-call]
    Stepper.gate = Gate()
    try:
        yield holder
    finally:
        del Stepper.optimizer


@pytest.mark.parametrize("function", [Stepper.step_elsewhere, Stepper.call_back])
def test_a_step_does_not_wait_for_handlers_of_its_call_chain(function: Any) -> None:
    with stepper() as holder:
        rpc.rpc_sync("w1", function, timeout=15.0)
        assert holder.rpc_sync().sum().item() == 6.0


def test_handlers_that_step_do_not_wait_for_each_other(w: Cluster) -> None:
    def train(worker: int) -> None:
        with w[worker]:
            rpc.rpc_sync("w1", Stepper.step, timeout=15.0)

    def release() -> None:
        Stepper.gate.wait_for(2)
        Stepper.gate.open()

    with stepper() as holder:
        run_all([lambda: train(0), lambda: train(2), release], timeout=15.0)
        assert holder.rpc_sync().sum().item() == 3.0
