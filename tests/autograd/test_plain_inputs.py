"""Plain backward passes for given inputs: their gradients, and the hooks that run."""

from collections.abc import Iterator

import pytest
import torch
from plain_helpers import State, grad_of, new_weight, ones, scale
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad import rpc
from telegrad.options import Options
from telegrad.testing import Cluster, cluster

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(scope="module")
def group() -> Iterator[Cluster]:
    with cluster(2, options=Options(plain_backward=True)) as workers:
        yield workers


@pytest.fixture(autouse=True)
def weight() -> None:
    State.weight = new_weight()


def test_an_input_given_twice_gets_its_gradient_once() -> None:
    x = ones()
    rpc.rpc_sync("w1", scale, (x,)).sum().backward(inputs=[x, x, get_gradient_edge(x)])
    assert grad_of(x) == [1, 2, 3]


def hook_into(runs: list[str], **leaves: Tensor) -> None:
    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(lambda _, name=name: runs.append(name))  # type: ignore[no-untyped-call]


def test_post_accumulate_hooks_do_not_run_without_accumulation() -> None:
    x, other = ones(), ones()
    runs: list[str] = []
    hook_into(runs, x=x, other=other, weight=State.weight)
    y = rpc.rpc_sync("w1", scale, (x,)) * other
    assert torch.autograd.grad(y.sum(), [x])[0].tolist() == [1, 2, 3]
    assert runs == []


@pytest.mark.parametrize("tensor_hook", [False, True])
def test_post_accumulate_hooks_of_inputs_run_once(tensor_hook: bool) -> None:
    x, other = ones(), ones()
    runs: list[str] = []
    hook_into(runs, x=x, other=other, weight=State.weight)
    if tensor_hook:
        x.register_hook(lambda _: runs.append("tensor hook"))
    y = rpc.rpc_sync("w1", scale, (x,)) * other
    y.sum().backward(inputs=[x])
    assert runs == ["tensor hook"] * tensor_hook + ["x"]
    assert grad_of(x) == [1, 2, 3]
