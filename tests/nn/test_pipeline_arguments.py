"""Arguments and targets of pipelines: tuples, lists, dicts and other values."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_helpers import batch, equal, gradients, stages
from torch import Tensor

from telegrad.nn import Pipeline
from telegrad.testing import Cluster, assert_quiescent, cluster


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with cluster(2) as group:
        yield group


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
