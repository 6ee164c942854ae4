"""Pipelines after the loss of a stage: errors at once, which name the worker."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.nn.functional as F
from pipeline_helpers import Failing, Gate, Gated, batch, gates, layer, loss_of_first, stages
from torch import Tensor, nn, zeros

from telegrad import rpc
from telegrad.errors import OwnerLost, WorkerLost
from telegrad.nn import Pipeline
from telegrad.nn.pipeline import pipeline, requests
from telegrad.rpc import Options
from telegrad.testing import Cluster, cluster, eventually, faults
from telegrad.testing.faults import Plan, Rule


@pytest.fixture
def w() -> Iterator[Cluster]:
    with cluster(3, Options(faults=str(Plan()), resume=False)) as group:
        yield group
    gates.clear()


@pytest.mark.usefixtures("w")
def test_each_use_after_a_lost_connection_names_the_owner() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=2)
    x, target = batch(4)
    pipe.step(x, target=target)
    cut, held = Rule("cut", "w0", "w2", "call"), pipe._rrefs[1]
    faults.add(cut)
    with pytest.raises(WorkerLost):
        rpc.rpc_sync("w2", abs, (-1,))
    faults.remove(cut)
    eventually(lambda: held.worker.references.unusable_reason(held.id, held.owner_id) is not None)
    assert rpc.rpc_sync("w2", abs, (-1,)) == 1
    uses: list[Callable[[], object]] = [lambda: pipe.step(x, target=target), lambda: pipe(x), pipe.zero_grad]
    for use in uses:
        with pytest.raises(OwnerLost, match="was lost with its owner, worker w2") as caught:
            use()
        assert caught.value.name == "w2"


asked: list[str] = []
"""Workers that have been asked to drop the step."""


async def note_drop(*_: object) -> None:
    asked.append(rpc.get_worker_info().name)


class Loses(nn.Module):
    """Stage whose forward pass reports the loss of a worker."""

    def forward(self, x: Tensor) -> Tensor:
        raise WorkerLost("w2", "it is silent")


@pytest.mark.usefixtures("w", "quiet")
def test_a_failed_step_does_not_wait_for_a_stage_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    monkeypatch.setattr(requests, "drop_step", note_drop)
    pipe = Pipeline([("w1", Loses), ("w2", layer, (1,)), ("w0", layer, (2,))], F.mse_loss, micro_batches=2)
    with pytest.raises(WorkerLost, match="worker w2 is lost"):
        pipe.step(batch(4)[0], target=batch(4)[1])
    assert sorted(asked) == ["w0", "w1"]


@pytest.mark.usefixtures("w", "quiet")
def test_a_failed_step_waits_only_a_while_for_a_pass_that_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_DROP_TIMEOUT", 0.2)
    specs: list[Any] = [("w1", Failing, ("forward",)), ("w2", GatedPair)]
    pipe = Pipeline(specs, loss_of_first, micro_batches=2)
    gate = gates["second"] = Gate()
    marks = zeros(4)
    marks[3] = Failing.MARK  # in the second micro-batch, when w2 runs the first one
    opening = threading.Timer(20, gate.opened.set)  # ends a test that fails
    opening.start()
    with pytest.raises(KeyError, match="in the forward pass"):
        pipe.step(batch(4)[0], marks, target=batch(4)[1], timeout=0)
    assert not gate.opened.is_set()
    opening.cancel()
    gate.opened.set()
    gates.clear()
    pipe.zero_grad()
    assert pipe.step(batch(4)[0], zeros(4), target=batch(4)[1]) > 0


class GatedPair(Gated):
    """Stage that waits at the gate "second", and passes its second argument on."""

    def __init__(self) -> None:
        super().__init__("second")

    def forward(self, x: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), marks
