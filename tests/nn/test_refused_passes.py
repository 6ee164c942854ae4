"""An event loop refuses passes of remote modules before they run."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pipeline_helpers import batch, equal, gradients, layer, stages
from torch import Tensor, nn
from torch.nn import functional as F

from telegrad import rpc
from telegrad.nn import Pipeline, RemoteModule
from telegrad.testing import Cluster, Local

pytestmark = pytest.mark.usefixtures("clean")

runs: Counter[str] = Counter()  # by name of the worker


@pytest.fixture(autouse=True)
def no_runs() -> Iterator[None]:
    runs.clear()
    yield
    runs.clear()


class Counted(nn.Module):
    """Module that counts its runs, and the modules that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layer(1)
        runs["made"] += 1

    def forward(self, x: Tensor) -> Tensor:
        runs["forward"] += 1
        return self.inner(x)  # type: ignore[no-any-return]


async def run_module(module: RemoteModule, way: str) -> None:
    x, _ = batch(2)
    module(x) if way == "call" else module.forward(x)


async def run_module_later(module: RemoteModule) -> Tensor:
    x, _ = batch(2)
    return await module.forward_async(x)


@pytest.mark.parametrize("way", ["call", "forward"])
def test_a_refused_module_does_not_run(way: str) -> None:
    module = RemoteModule("w2", Counted)
    with pytest.raises(RuntimeError, match=r"would block the event loop .*; use `await module.forward_async\(...\)`"):
        rpc.rpc_sync("w1", run_module, (module, way))
    assert torch.equal(rpc.rpc_sync("w1", run_module_later, (module,)), layer(1)(batch(2)[0]))
    assert runs["forward"] == 1


async def make() -> None:
    Pipeline([("w1", Counted), ("w2", Counted)], F.mse_loss)


def test_a_refused_pipeline_makes_no_module() -> None:
    with pytest.raises(RuntimeError, match=r"Pipeline\(\) would block .*; use `await asyncio.to_thread"):
        rpc.rpc_sync("w0", make)
    assert runs["made"] == 0


def step(pipe: Pipeline) -> float:
    x, target = batch(8)
    return float(pipe.step(x, target=target))


def infer(pipe: Pipeline) -> list[list[float]]:
    result: list[list[float]] = pipe(batch(8)[0]).tolist()
    return result


def zero(pipe: Pipeline) -> None:
    pipe.zero_grad()


OPERATIONS: dict[str, Any] = {"Pipeline.step": step, "Pipeline.forward": infer, "Pipeline.zero_grad": zero}


async def attempt(operation: str, pipe: Local[Pipeline]) -> None:
    OPERATIONS[operation](pipe.value)


async def repeat(operation: str, pipe: Local[Pipeline]) -> object:
    return await asyncio.to_thread(OPERATIONS[operation], pipe.value)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_refused_step_has_no_effect_and_can_be_repeated(operation: str, three: Cluster) -> None:
    pipe, same = (Pipeline(stages(("w1", "w2")), F.mse_loss, micro_batches=4) for _ in range(2))
    for one in (pipe, same):
        step(one)
    before, number = gradients(pipe), pipe._number
    local = Local(pipe)
    with pytest.raises(RuntimeError, match=rf"{operation} would block .*; use `await asyncio.to_thread"):
        rpc.rpc_sync("w0", attempt, (operation, local))
    assert equal(gradients(pipe), before)
    assert pipe._number == number  # the stages have been asked for nothing
    assert rpc.rpc_sync("w0", repeat, (operation, local)) == OPERATIONS[operation](same)
    assert equal(gradients(pipe), gradients(same))
