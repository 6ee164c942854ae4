"""Plain backward passes for given inputs: their gradients, and the hooks that run."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad import rpc
from telegrad.options import Options
from telegrad.testing import Cluster, cluster

pytestmark = pytest.mark.usefixtures("group")


class State:
    """Parameter of worker w1, which shares this process."""

    weight: Tensor


@pytest.fixture(scope="module")
def group() -> Iterator[Cluster]:
    with cluster(2, options=Options(plain_backward=True)) as workers:
        yield workers


@pytest.fixture(autouse=True)
def new_weight() -> None:
    State.weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def ones() -> Tensor:
    return torch.ones(3, requires_grad=True)


def scale(x: Tensor) -> Tensor:
    return State.weight * x


def grad_of(tensor: Tensor) -> Any:
    return None if tensor.grad is None else tensor.grad.tolist()


def test_an_input_given_twice_gets_its_gradient_once() -> None:
    x = ones()
    rpc.rpc_sync("w1", scale, (x,)).sum().backward(inputs=[x, x, get_gradient_edge(x)])
    assert grad_of(x) == [1, 2, 3]
