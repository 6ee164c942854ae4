"""State of distributed optimizers: whole, per owner, and in local optimizers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_helpers import Local, Spread, assert_equal
from torch import optim
from torch.optim import lr_scheduler

from telegrad import rpc
from telegrad.optim import DistributedOptimizer
from telegrad.testing import Cluster, assert_quiescent, cluster


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    with cluster(3) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_left(w: Cluster) -> Iterator[None]:
    yield
    for worker in w:
        assert_quiescent(worker)


CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.1, "fused": True}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.NAdam, {"lr": 0.1}),
    (optim.Rprop, {"lr": 0.1}),
    (optim.Adafactor, {"lr": 0.1}),
]
IDS = [f"{cls.__name__}-{len(kwargs)}" for cls, kwargs in CLASSES]


def both(cls: Any, kwargs: dict[str, Any], places: Any = ("w1", "w2")) -> tuple[Spread, Any, Local, Any]:
    model, local = Spread(places), Local(len(places))
    return model, DistributedOptimizer(cls, model.groups(), **kwargs), local, cls(local.groups(), **kwargs)


def assert_same_state(mine: dict[str, Any], expected: dict[str, Any]) -> None:
    assert mine["param_groups"] == expected["param_groups"]
    assert list(mine["state"]) == list(expected["state"])
    for one, other in zip(mine["state"].values(), expected["state"].values(), strict=True):
        assert list(one) == list(other)
        for value, known in zip(one.values(), other.values(), strict=True):
            assert torch.equal(value, known) if isinstance(known, torch.Tensor) else value == known


@pytest.mark.parametrize(("cls", "kwargs"), CLASSES, ids=IDS)
def test_the_whole_state_is_that_of_a_local_optimizer(cls: Any, kwargs: dict[str, Any]) -> None:
    model, ours, local, theirs = both(cls, kwargs)
    assert_same_state(ours.state_dict(), theirs.state_dict())
    for number in range(3):
        model.train(ours, number)
        local.train(theirs, number)
    ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.02  # not sent yet
    assert_same_state(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize(("cls", "kwargs"), CLASSES, ids=IDS)
@pytest.mark.parametrize("into", ["local", "spread"])
def test_it_is_loaded_here_and_elsewhere(cls: Any, kwargs: dict[str, Any], into: str) -> None:
    """Training goes on as without the change of place."""
    model, ours, local, theirs = both(cls, kwargs)
    for one, optimizer in ((model, ours), (local, theirs)):
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in range(2):
            one.train(optimizer, number)  # type: ignore[attr-defined]
            scheduler.step()
    if into == "local":
        target: Any = Local()
        fresh: Any = cls(target.groups(), **kwargs)
    else:
        target = Spread(("w2", "w0"))
        fresh = DistributedOptimizer(cls, target.groups(), **kwargs)
    for source, copy in zip(model.layers, target.layers, strict=True):
        copy.load_state_dict(source.state_dict())
    fresh.load_state_dict(ours.state_dict())
    assert fresh.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert "initial_lr" in fresh.param_groups[1]
    for number in range(2, 4):
        target.train(fresh, number)
        local.train(theirs, number)
    for value, expected in zip(target.values(), local.values(), strict=True):
        assert torch.equal(value, expected)


def test_a_local_state_is_loaded() -> None:
    model, ours, local, theirs = both(optim.Adam, {"lr": 0.1}, ("w1", "w2", "w0"))
    local.train(theirs, 0)
    for copy, source in zip(model.layers, local.layers, strict=True):
        copy.load_state_dict(source.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for number in range(1, 3):
        model.train(ours, number)
        local.train(theirs, number)
    assert_equal(model, local)


def test_the_state_of_one_owner() -> None:
    model, ours, local, theirs = both(optim.Adam, {"lr": 0.1})
    for number in range(2):
        model.train(ours, number)
        local.train(theirs, number)
    whole = ours.state_dict()
    part = ours.state_dict(owner="w2")
    assert part["param_groups"][0]["params"] == [0]
    assert torch.equal(part["state"][0]["exp_avg"], whole["state"][1]["exp_avg"])
    assert torch.equal(part["state"][1]["exp_avg"], whole["state"][3]["exp_avg"])
    model.train(ours, 2)
    ours.load_state_dict(part, owner="w2")
    assert_same_state(ours.state_dict("w2"), part)
    assert not torch.equal(ours.state_dict()["state"][0]["exp_avg"], whole["state"][0]["exp_avg"])
    with pytest.raises(ValueError, match="worker w0 owns no parameters of this optimizer; its owners: w1, w2"):
        ours.state_dict(owner="w0")
    with pytest.raises(ValueError, match="different number of parameter groups"):
        ours.load_state_dict({"state": {}, "param_groups": []}, owner="w2")
    with pytest.raises(ValueError, match="group 0 has 2 parameters, the optimizer's has 1"):
        ours.load_state_dict(whole, owner="w2")


def test_the_state_is_a_copy() -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    model.train(optimizer, 0)
    saved = optimizer.state_dict()
    before = saved["state"][0]["momentum_buffer"].clone()
    model.train(optimizer, 1)
    assert torch.equal(saved["state"][0]["momentum_buffer"], before)
    saved["state"][0]["momentum_buffer"].zero_()
    assert not torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], torch.zeros(4, 4))


def test_hooks_of_the_state() -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("before"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append(state["more"]))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", 1, "after"]


def test_a_hook_may_change_the_state_in_place() -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)

    def hook(_: object, state: dict[str, Any]) -> None:
        state["param_groups"] = [{**group, "lr": 0.5} for group in state["param_groups"]]

    optimizer.register_load_state_dict_pre_hook(hook)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert saved["param_groups"][0]["lr"] == 0.1, "the caller's is unchanged"


# ---- what goes wrong


class FailsToLoad(optim.SGD):
    """Optimizer that fails on w1 after it has loaded a state."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if rpc.get_worker_info().name == "w1":
            raise OSError("disk")


@pytest.mark.parametrize("owner", [None, "w1"])
def test_options_are_those_of_the_program_after_a_failure(owner: str | None) -> None:
    """The owners have loaded others."""
    optimizer = DistributedOptimizer(FailsToLoad, Spread(("w1", "w2")).groups(), lr=0.1)
    state = optimizer.state_dict(owner)
    for group in state["param_groups"]:
        group.update(lr=7.0, momentum=0.5)
    with pytest.raises(OSError, match="disk"):
        optimizer.load_state_dict(state, owner)
    expected = [(0.05, 0), (0.1, 0)]
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == expected
    optimizer.step()
    for part in optimizer.remote_optimizers:
        assert rpc.rpc_sync(part.owner(), options_at, (part,)) == expected


def options_at(part: Any) -> list[tuple[float, float]]:
    return [(group["lr"], group["momentum"]) for group in part.local_value().optimizer.param_groups]


def test_a_state_of_other_groups() -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    model.train(optimizer, 0)
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="a different number of parameter groups: 2, while the optimizer has 1"):
        optimizer.load_state_dict(DistributedOptimizer(optim.SGD, model.groups(), lr=0.1).state_dict())
    fewer = DistributedOptimizer(optim.SGD, model.parameters()[1:], lr=0.1)
    with pytest.raises(ValueError, match="group 0 has 3 parameters, the optimizer's has 4"):
        optimizer.load_state_dict(fewer.state_dict())
    assert_same_state(optimizer.state_dict(), saved)


@pytest.mark.parametrize(("named", "name"), [(False, "parameter 2 of group 0"), (True, "parameter 'p2'")])
def test_a_state_of_another_shape(named: bool, name: str) -> None:
    """The parameter, both shapes and the owner are named; nothing is loaded."""
    model = Spread()
    given: list[Any] = model.parameters()
    if named:
        given = [(f"p{number}", one) for number, one in enumerate(given)]
    optimizer = DistributedOptimizer(optim.Adam, given)
    model.train(optimizer, 0)
    saved, wrong = optimizer.state_dict(), optimizer.state_dict()
    wrong["state"][0]["exp_avg"].zero_()
    wrong["state"][2]["exp_avg"] = torch.zeros(4, 5)
    with pytest.raises(
        ValueError, match=rf"'exp_avg' of {name} has the shape \[4, 5\].*worker w2 has the shape \[4, 4\]"
    ):
        optimizer.load_state_dict(wrong)
    assert_same_state(optimizer.state_dict(), saved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_that_is_loaded_after_a_conversion(dtype: torch.dtype) -> None:
    model, ours, local, theirs = both(optim.Adam, {"lr": 0.1})
    model.train(ours, 0)
    local.train(theirs, 0)
    mine, expected = ours.state_dict(), theirs.state_dict()
    for module in model.layers:
        module.to(dtype)
    for layer in local.layers:
        layer.to(dtype)
    ours.load_state_dict(mine)
    theirs.load_state_dict(expected)
    assert_same_state(ours.state_dict(), theirs.state_dict())
    assert ours.state_dict()["state"][0]["exp_avg"].dtype == dtype


class Counting(optim.SGD):
    """Optimizer that adds an entry to its state."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict(state_dict)


def test_entries_that_a_class_adds_to_its_state() -> None:
    model, ours, local, theirs = both(Counting, {"lr": 0.1}, ("w1",))
    model.train(ours, 0)
    local.train(theirs, 0)
    assert ours.state_dict() == theirs.state_dict()
    theirs.steps = 7
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict()["steps"] == ours.state_dict(owner="w1")["steps"] == 7


def test_entries_that_a_class_adds_on_several_owners() -> None:
    model, ours, _, theirs = both(Counting, {"lr": 0.1})
    model.train(ours, 0)
    with pytest.raises(ValueError, match=r"'steps' in their states.*use state_dict\(owner=\.\.\.\)"):
        ours.state_dict()
    saved = [ours.state_dict(owner=owner) for owner in ("w1", "w2")]
    assert [state["steps"] for state in saved] == [1, 1]
    theirs.steps = 7
    ours.load_state_dict(theirs.state_dict())
    assert [ours.state_dict(owner=owner)["steps"] for owner in ("w1", "w2")] == [7, 7]
    ours.load_state_dict(saved[0], owner="w1")
    assert [ours.state_dict(owner=owner)["steps"] for owner in ("w1", "w2")] == [1, 7]
