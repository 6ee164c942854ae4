"""Checkpoints of torch.distributed.checkpoint, and runs that continue from one."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from model_helpers import Local, Spread
from torch import nn, optim
from torch.optim import lr_scheduler

from telegrad import rpc
from telegrad.optim import DistributedOptimizer, load_checkpoint
from telegrad.testing import Cluster, Processes, assert_quiescent, cluster


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    with cluster(4) as group:
        yield group


@pytest.fixture
def clean(w: Cluster) -> Iterator[None]:
    yield
    for worker in w:
        assert_quiescent(worker)


class Run:
    """Model, optimizer and scheduler, with an entry for the number of steps."""

    def __init__(self, places: tuple[str, ...], cls: Any = optim.Adam, **kwargs: Any) -> None:
        self.model = Spread(places)
        self.optimizer = DistributedOptimizer(cls, self.model.groups(), **{"lr": 0.1, **kwargs})
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.count = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(self.model.train(self.optimizer, self.count))
            self.scheduler.step()
            self.count += 1
        return losses

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": nn.ModuleList(self.model.layers),
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "count": self.count,
        }

    def save(self, path: Path) -> None:
        dcp.save(self.state, checkpoint_id=path)

    def load(self, path: Path) -> None:
        state = self.state
        load_checkpoint(state, checkpoint_id=path)
        self.count = state["count"]


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (optim.Adam, {}),
    (optim.AdamW, {"fused": True}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (optim.SGD, {}),
    (optim.Adafactor, {}),
]


@pytest.mark.parametrize(("cls", "kwargs"), KINDS, ids=[f"{cls.__name__}-{len(kwargs)}" for cls, kwargs in KINDS])
@pytest.mark.parametrize("places", [("w1", "w2", "w3"), ("w0", "w0", "w2"), ("w3", "w3", "w3")], ids="-".join)
@pytest.mark.usefixtures("clean")
def test_a_run_continues_on_any_placement(
    cls: Any, kwargs: dict[str, Any], places: tuple[str, ...], tmp_path: Path
) -> None:
    run = Run(("w1", "w2", "w3"), cls, **kwargs)
    run.train(3)
    run.save(tmp_path)
    expected = run.train(3)
    again = Run(places, cls, **kwargs)
    again.load(tmp_path)
    assert again.count == 3
    assert again.train(3) == expected
    assert all(torch.equal(a, b) for a, b in zip(again.model.values(), run.model.values(), strict=True))
    assert again.scheduler.get_last_lr() == run.scheduler.get_last_lr()


@pytest.mark.usefixtures("clean")
def test_a_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    run = Run(("w1", "w2"), optim.SGD, momentum=0.9, dampening=0.5)
    run.save(tmp_path)
    again = Run(("w2", "w1"), optim.SGD, momentum=0.9, dampening=0.5)
    again.train(1)
    again.load(tmp_path)
    assert again.train(2) == run.train(2)


@pytest.mark.usefixtures("clean")
def test_torchs_own_load_works_where_the_state_has_all_entries(tmp_path: Path) -> None:
    run = Run(("w1", "w2"))
    run.train(2)
    run.save(tmp_path)
    expected = run.train(2)
    again = Run(("w2", "w3"))
    again.train(1)
    state = again.state
    dcp.load(state, checkpoint_id=tmp_path)
    again.count = state["count"]
    assert again.train(2) == expected


@pytest.mark.usefixtures("clean")
def test_a_local_model_and_optimizer_load_it(tmp_path: Path) -> None:
    run = Run(("w1", "w2"))
    run.train(2)
    run.save(tmp_path)
    local = Local()
    theirs = optim.Adam(local.groups(), lr=0.1)
    load_checkpoint({"model": nn.ModuleList(local.layers), "optimizer": theirs}, checkpoint_id=tmp_path)
    assert local.train(theirs, 2) == run.train(1)[0]
    for mine, expected in zip(local.values(), run.model.values(), strict=True):
        assert torch.equal(mine, expected)


# ---- what goes wrong


@pytest.mark.usefixtures("clean")
def test_a_checkpoint_of_other_shapes_names_and_groups(tmp_path: Path) -> None:
    from telegrad.nn import RemoteModule

    run = Run(("w1", "w2"))
    run.train(1)
    run.save(tmp_path)
    other = RemoteModule("w3", nn.Linear, (4, 5))
    with pytest.raises(
        RuntimeError, match=r"on worker w3: (.|\n)*size mismatch for weight(.|\n)*\[4, 4\](.|\n)*\[5, 4\]"
    ):
        load_checkpoint({"model": nn.ModuleList([run.model.layers[0], other])}, checkpoint_id=tmp_path)
    weight, bias = other.remote_parameters()
    a, b, *_ = run.model.parameters()
    groups = [{"params": [a, weight]}, {"params": [b, bias]}]
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 has the shape \[4, 4\].*worker w3.*\[5, 4\]"):
        load_checkpoint({"optimizer": DistributedOptimizer(optim.Adam, groups)}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="a different number of parameter groups: 2, while the optimizer has 1"):
        load_checkpoint({"optimizer": DistributedOptimizer(optim.Adam, [a])}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="the checkpoint has no 'net': it has 'count', 'model', 'optimizer'"):
        load_checkpoint({"net": other}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="needs a checkpoint_id"):
        load_checkpoint({})


def test_a_lost_owner_is_named(tmp_path: Path) -> None:
    with cluster(3, graceful=False) as group:
        run = Run(("w1", "w2"))
        run.train(1)
        run.save(tmp_path)
        group.workers.pop().shutdown(graceful=False)
        for what in (run.save, run.load):  # the references of w2 are lost, too
            with pytest.raises(RuntimeError, match="worker w2"):
                what(tmp_path)
    del run


# ---- a killed run

STEPS, SAVED, KILLED = 8, 4, 6


def train_in_processes(rank: int, n: int, init_method: str, folder: str, die: bool, places: tuple[str, ...]) -> Any:
    """Run the trainer w0, which saves, and continues from a checkpoint if any."""
    options = rpc.Options(init_method=init_method)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    losses = None
    if rank == 0:
        run = Run(places)
        path = Path(folder)
        if (path / ".metadata").exists():
            run.load(path)
        while run.count < STEPS:
            losses = run.train(1)
            if run.count == SAVED:
                run.save(path)
            if die and run.count == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
        values = run.model.values()
        del run
    rpc.shutdown()
    return (losses, [value.tolist() for value in values]) if rank == 0 else None


@pytest.mark.timeout(180)
def test_a_killed_run_reaches_the_same_loss_bit_for_bit(tmp_path: Path) -> None:
    """The trainer and an owner are killed; the run continues on fewer workers."""
    with Processes(3, train_in_processes, str(tmp_path / "killed"), True, ("w1", "w2")) as group:
        with pytest.raises(AssertionError, match="died with exit code -9"):
            group.results(60.0, ranks=[0])
        group.kill(1)
    with Processes(2, train_in_processes, str(tmp_path / "killed"), False, ("w1", "w0")) as again:
        continued = again.results(60.0)[0]
    with cluster(3):
        run = Run(("w1", "w2"))
        losses = run.train(STEPS)
        values = [value.tolist() for value in run.model.values()]
        del run
    assert continued == ([losses[-1]], values)
