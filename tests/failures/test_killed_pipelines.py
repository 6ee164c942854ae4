"""Pipelines of which a worker is killed during a step."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from process_helpers import TIMEOUT, actors, state
from torch import Tensor, nn

from telegrad.errors import WorkerLost
from telegrad.nn import Pipeline
from telegrad.rpc.api import _worker
from telegrad.testing import assert_quiescent, eventually

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Gated(nn.Module):
    """Stage whose first pass waits until the test opens the gate of its process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        state["entered"], state["opened"] = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        state["entered"].set()
        assert state["opened"].wait(TIMEOUT)
        y: Tensor = self.layer(x)
        return y


def run_pipeline(schedule: Any) -> str:
    """Run a step during which the last stage is killed, then a step of the others."""
    specs: list[Any] = [("w1", nn.Linear, (4, 4)), ("w2", Gated), ("w3", nn.Linear, (4, 4))]
    pipe = Pipeline(specs, F.mse_loss, micro_batches=4, schedule=schedule)
    names = []
    for _ in range(2):
        try:
            pipe.step(X, target=X)
        except WorkerLost as error:
            names.append(error.name)
    assert names == ["w3", "w3"]
    shorter = Pipeline(list(pipe.stages)[:2], F.mse_loss, micro_batches=4, schedule=schedule)
    shorter.zero_grad()
    loss = shorter.step(X, target=X)
    assert torch.allclose(loss, F.mse_loss(shorter(X), X))
    return "done"


def wait_until_entered() -> None:
    eventually(lambda: "entered" in state, TIMEOUT)
    assert state["entered"].wait(TIMEOUT)


def open_gate() -> None:
    state["opened"].set()


def check() -> None:
    assert_quiescent(_worker(), TIMEOUT)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_a_killed_stage(schedule: str, tmp_path: Path) -> None:
    with actors(4, tmp_path) as workers:
        caller, first, middle, last = workers
        running = caller.begin(run_pipeline, schedule)
        middle.do(wait_until_entered)
        last.end()
        middle.do(open_gate)
        assert running.result() == "done"
        for worker in (caller, first, middle):
            worker.do(check)


def test_a_killed_caller(tmp_path: Path) -> None:
    """Its stages drop the step, and are released with its references."""
    with actors(4, tmp_path) as workers:
        caller, *others = workers
        caller.begin(run_pipeline, "1f1b")
        others[1].do(wait_until_entered)
        caller.end()
        others[1].do(open_gate)
        for worker in others:
            worker.do(check)
