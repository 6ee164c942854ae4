"""Arguments and targets of pipelines: tuples, lists, dicts and other values."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_helpers import batch, equal, gradients, stages
from torch import Tensor, nn

from telegrad.nn import Pipeline, RemoteModule
from telegrad.nn.owner import moved
from telegrad.testing import Cluster, assert_quiescent


@pytest.fixture(autouse=True)
def clean(two: Cluster) -> Iterator[None]:
    yield
    targets.clear()  # they are in received memory
    for worker in two:
        assert_quiescent(worker)


# ---- targets


targets: list[Any] = []
"""Targets that the loss function has got."""


def loss_of_pair(y: Tensor, target: Any) -> Tensor:
    targets.append(target)
    return F.mse_loss(y * target[2], target[0] + target[1])


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_tuple_or_list_is_divided_item_by_item(kind: Any) -> None:
    pipe, expected = (Pipeline(stages(["w1"]), loss, micro_batches=4) for loss in (loss_of_pair, F.mse_loss))
    x, target = batch(8)
    first, second = target / 4, (target * 3 / 4).requires_grad_()  # a target needs no gradient
    loss = pipe.step(x, target=kind((first, second, 1.0)))
    assert [type(one) for one in targets] == [kind] * 4
    assert torch.equal(torch.cat([one[0] for one in targets]), first)
    assert torch.equal(torch.cat([one[1] for one in targets]), second)
    assert all(one[2] == 1.0 and not one[1].requires_grad for one in targets)
    assert loss == expected.step(x, target=first + second.detach())
    assert equal(gradients(pipe), gradients(expected))
    assert second.grad is None


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ({"a": torch.zeros(8)}, "the given one is a dict, whose tensors would not be divided"),
        ([torch.zeros(8), (torch.zeros(8),)], "the given one has a tuple inside"),
        ((torch.zeros(8), {"a": 1}), "the given one has a dict inside"),
    ],
)
def test_a_target_with_a_container_is_refused(target: Any, text: str) -> None:
    pipe = Pipeline(stages(["w1"]), F.mse_loss, micro_batches=4)
    with pytest.raises(TypeError, match=f"the target of a pipeline's step is a tensor, or a tuple or list.*{text}"):
        pipe.step(batch(8)[0], target=target)


def test_a_list_has_tensors_of_one_size() -> None:
    pipe = Pipeline(stages(["w1"]), loss_of_pair, micro_batches=4)
    with pytest.raises(ValueError, match="differ in their first dimension: 8, 8, 7"):
        pipe.step(batch(8)[0], target=[torch.zeros(8), torch.zeros(7), 1.0])


# ---- inputs


@pytest.mark.parametrize(
    ("kind", "wrapped"),
    [("dict", lambda x: {"x": [x]}), ("list", lambda x: [x]), ("tuple", lambda x: (1, x)), ("set", lambda x: {x})],
)
def test_an_input_that_requires_grad_in_a_container_is_refused(kind: str, wrapped: Any) -> None:
    pipe = Pipeline(stages(["w1"]), F.mse_loss, micro_batches=4)
    x, target = batch(8)
    with pytest.raises(TypeError, match=f"is a {kind} with such a tensor inside, which would get no gradient"):
        pipe.step(x, wrapped(x.clone().requires_grad_()), target=target)


# ---- dicts


class Options(dict[str, Any]):
    """Dict with another constructor, and an attribute."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note


def options() -> Options:
    made = Options("kept")
    made.update(scale=torch.tensor([2.0]), rest=[torch.ones(1)])
    return made


class Scaled(nn.Module):
    """Stage with a dict as its second argument."""

    def forward(self, x: Tensor, of: dict[str, Any]) -> Tensor:
        assert isinstance(of, defaultdict)
        result: Tensor = x * of["scale"] + of["missing"]
        return result


DICTS = [
    defaultdict(int, scale=torch.tensor([2.0])),
    OrderedDict(b=torch.ones(1), a=1),
    Counter("abb"),
    options(),
]


@pytest.mark.parametrize("given", DICTS, ids=lambda given: type(given).__name__)
def test_dicts_of_all_classes_are_moved(given: Any) -> None:
    items = dict(given)
    found = moved(given, torch.device("meta"))
    assert type(found) is type(given)
    assert list(found) == list(items)
    assert getattr(found, "note", None) == getattr(given, "note", None)
    assert getattr(found, "default_factory", None) == getattr(given, "default_factory", None)
    for key, value in found.items():
        one = value[0] if isinstance(value, list) else value
        assert one == items[key] if isinstance(one, int) else one.is_meta
    assert all(given[key] is value for key, value in items.items())  # unchanged


def test_a_stage_and_a_remote_module_get_a_dict_with_a_default() -> None:
    x, given = batch(4)[0], defaultdict(int, scale=torch.tensor([2.0]))
    pipe = Pipeline([("w1", Scaled)], micro_batches=2)
    assert torch.equal(pipe(x, given), 2 * x)
    assert torch.equal(RemoteModule("w1", Scaled)(x, given), 2 * x)
