"""An event loop refuses operations of an optimizer before any owner is called."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer, GradScaler, clip_grad_norm_, load_checkpoint
from telegrad.rpc import RRef
from telegrad.testing import Cluster, Local, assert_quiescent, cluster

PLACES = ("w1", "w2", "w0")


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    with cluster(3) as group:
        yield group


@pytest.fixture(autouse=True)
def clean(w: Cluster) -> Iterator[None]:
    yield
    for worker in w:
        assert_quiescent(worker)


def parameter() -> torch.Tensor:
    """Return a parameter of value and gradient 1."""
    made = torch.ones(1, requires_grad=True)
    made.grad = torch.ones(1)
    return made


def value_and_gradient(rref: RRef[torch.Tensor]) -> tuple[float, float | None]:
    made = rref.local_value()
    return made.item(), None if made.grad is None else made.grad.item()


class Trained:
    """A parameter on each worker, and their optimizer."""

    def __init__(self, places: tuple[str, ...] = PLACES) -> None:
        self.places = places
        self.parameters: list[RRef[torch.Tensor]] = [rpc.remote(place, parameter) for place in places]
        self.optimizer = DistributedOptimizer(optim.SGD, self.parameters, lr=0.5)
        self.further: list[RRef[torch.Tensor]] = [rpc.remote(place, parameter) for place in places]
        self.scaler = GradScaler("cpu", init_scale=2.0)
        self.closures = 0

    def state(self) -> list[tuple[float, float | None]]:
        return [rpc.rpc_sync(rref.owner_id, value_and_gradient, (rref,)) for rref in self.parameters]

    def closure(self) -> None:
        self.closures += 1


def accumulate(t: Trained) -> None:
    with autograd.context() as context_id:
        t.optimizer.accumulate(context_id)


def unscale(t: Trained) -> None:
    t.scaler.scale(torch.ones(1))
    t.scaler.unscale_(t.optimizer)


def scaled_step(t: Trained) -> None:
    t.scaler.scale(torch.ones(1))
    t.scaler.step(t.optimizer)


OPERATIONS: dict[str, Callable[[Trained], object]] = {
    "DistributedOptimizer(SGD)": lambda t: DistributedOptimizer(optim.SGD, t.further, lr=0.5),
    "DistributedOptimizer.step": lambda t: t.optimizer.step(t.closure),
    "DistributedOptimizer.zero_grad": lambda t: t.optimizer.zero_grad(),
    "DistributedOptimizer.accumulate": accumulate,
    "DistributedOptimizer.add_param_group": lambda t: t.optimizer.add_param_group({"params": t.further, "lr": 0.25}),
    "DistributedOptimizer.state_dict": lambda t: t.optimizer.state_dict(),
    "DistributedOptimizer.load_state_dict": lambda t: t.optimizer.load_state_dict(
        {"state": {}, "param_groups": [{"lr": 0.125, "params": list(range(len(t.parameters)))}]}
    ),
    "clip_grad_norm_": lambda t: clip_grad_norm_(t.parameters, 0.1),
    "GradScaler.unscale_": unscale,
    "GradScaler.unscale_, for a step": scaled_step,
}


async def attempt(operation: str, trained: Local[Trained]) -> None:
    OPERATIONS[operation](trained.value)


async def repeat(operation: str, trained: Local[Trained]) -> None:
    await asyncio.to_thread(OPERATIONS[operation], trained.value)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_refused_operation_has_no_effect_and_can_be_repeated(operation: str) -> None:
    refused, expected = Trained(), Trained()
    before = refused.state()
    name = operation.partition(",")[0]
    local = Local(refused)
    with pytest.raises(RuntimeError) as caught:
        rpc.rpc_sync("w0", attempt, (operation, local))
    instead = "use `await asyncio.to_thread(...)` for it"
    assert str(caught.value) == f"{name} would block the event loop of worker 'w0'; {instead}"
    assert refused.state() == before
    assert refused.closures == 0
    rpc.rpc_sync("w0", repeat, (operation, local))
    OPERATIONS[operation](expected)
    assert refused.state() == expected.state()
    assert refused.closures == expected.closures
    assert refused.optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"]
    for trained in (refused, expected):
        trained.optimizer.step()
    assert refused.state() == expected.state()


@pytest.mark.parametrize("operation", ["DistributedOptimizer.step", "DistributedOptimizer.zero_grad"])
def test_an_operation_on_the_own_worker_does_not_wait_for_others(operation: str) -> None:
    trained = Trained(("w0",))
    before = trained.state()
    rpc.rpc_sync("w0", attempt, (operation, Local(trained)))
    assert trained.state() != before


async def load(state: Local[dict[str, Any]], folder: str) -> None:
    load_checkpoint(state.value, checkpoint_id=folder)


def test_a_refused_checkpoint_is_not_read(tmp_path: Path) -> None:
    state: Local[dict[str, Any]] = Local({"epoch": 1})
    with pytest.raises(RuntimeError, match=r"load_checkpoint would block .*; use `await asyncio.to_thread"):
        rpc.rpc_sync("w1", load, (state, str(tmp_path / "none")))
