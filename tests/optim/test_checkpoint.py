"""Checkpoints of torch.distributed.checkpoint, and runs that continue from one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from model_helpers import Local, Run
from torch import nn, optim
from torch.testing._internal.distributed.fake_pg import FakeStore

from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, load_checkpoint
from telegrad.testing import Cluster, assert_quiescent, cluster


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    with cluster(4) as group:
        yield group


@pytest.fixture
def clean(w: Cluster) -> Iterator[None]:
    yield
    for worker in w:
        assert_quiescent(worker)


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


@pytest.fixture
def group_of_two() -> Iterator[None]:
    """A process group of torch with another process, which takes no part."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("clean", "group_of_two")
def test_one_process_of_a_group_saves_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for_the_other(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective of the group would wait for the other process")

    for name in ("gather_object", "scatter_object_list", "broadcast_object_list", "all_gather_object", "barrier"):
        monkeypatch.setattr(torch.distributed, name, wait_for_the_other)
    run = Run(("w1", "w2"))
    run.train(2)
    dcp.save(run.state, checkpoint_id=tmp_path, no_dist=True)
    expected = run.train(2)
    again = Run(("w2", "w3"))
    state = again.state
    with pytest.raises(AssertionError, match="would wait for the other process"):
        load_checkpoint(again.state, checkpoint_id=tmp_path)
    load_checkpoint(state, checkpoint_id=tmp_path, no_dist=True)
    again.count = state["count"]
    assert again.train(2) == expected


class WithoutState:
    def __init__(self) -> None:
        self.loaded: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


@pytest.mark.usefixtures("clean")
def test_modules_and_values_without_entries(tmp_path: Path) -> None:
    other = WithoutState()
    state = {
        "linear": RemoteModule("w1", nn.Linear, (2, 2)),
        "relu": RemoteModule("w1", nn.ReLU),
        "local": nn.Sequential(nn.ReLU(), nn.Flatten()),
        "dict": {"nothing": {}},
        "other": other,
        "count": 3,
    }
    dcp.save(state, checkpoint_id=tmp_path)
    given = {**state, "linear": RemoteModule("w2", nn.Linear, (2, 2)), "count": 0}
    load_checkpoint(given, checkpoint_id=tmp_path)
    assert given["count"] == 3
    assert other.loaded == [{}]
    assert all(torch.equal(a, b) for a, b in zip(*(_values(one["linear"]) for one in (given, state)), strict=True))
    for missing in (nn.Linear(1, 1), RemoteModule("w1", nn.Linear, (2, 2)), {"nothing": {"a": 1}}, 1, None):
        with pytest.raises(ValueError, match="the checkpoint has no 'more': it has 'count', 'linear'"):
            load_checkpoint({**state, "more": missing}, checkpoint_id=tmp_path)


def _values(module: Any) -> list[torch.Tensor]:
    return list(module.state_dict().values())


# ---- what goes wrong


@pytest.mark.usefixtures("clean")
def test_a_checkpoint_of_other_shapes_names_and_groups(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("clean")
def test_nothing_is_loaded_if_an_optimizer_cannot_be(tmp_path: Path) -> None:
    run = Run(("w1", "w2"))
    run.train(1)
    dcp.save({**run.state, "values": {"x": torch.ones(2)}}, checkpoint_id=tmp_path)
    again = Run(("w1", "w2"))
    before, values = again.model.values(), {"x": torch.zeros(2)}
    parameters = again.model.parameters()
    few = DistributedOptimizer(optim.Adam, parameters[:1])
    for name, optimizer, text in [
        ("optimizer", few, "a different number of parameter groups"),
        ("optimizer", optim.Adam(nn.Linear(4, 4).parameters()), "a different number of parameter groups"),
        ("model", few, "the checkpoint has no state of an optimizer as 'model': it has '0"),
    ]:
        state = {"values": values, "count": 0, "model": again.state["model"], name: optimizer}
        with pytest.raises(ValueError, match=text):
            load_checkpoint(state, checkpoint_id=tmp_path)
        assert values["x"].tolist() == [0, 0]
        assert state["count"] == 0
        assert all(torch.equal(a, b) for a, b in zip(again.model.values(), before, strict=True))


class Ordered(nn.Linear):
    """Module that notes when it is loaded."""

    loaded: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        super().__init__(1, 1)
        self.name = name

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.loaded.append(self.name)
        return super().load_state_dict(*args, **kwargs)


def test_targets_are_loaded_in_the_order_of_the_state(tmp_path: Path) -> None:
    names = ["f", "b", "d", "a", "e", "c"]
    state: dict[str, Any] = {name: Ordered(name) for name in names}
    dcp.save(state, checkpoint_id=tmp_path)
    Ordered.loaded.clear()
    load_checkpoint(state, checkpoint_id=tmp_path)
    assert Ordered.loaded == names


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
