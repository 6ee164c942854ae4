"""Views under no_grad in messages: some require grad and get no gradient."""

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd.recording import edges_of, record_sent
from telegrad.testing import Cluster, cluster


def with_view(x: Tensor) -> list[Tensor]:
    y = x * 2
    with torch.no_grad():
        return [y, y[1:3]]


def with_leaf(x: Tensor) -> list[Tensor]:
    y, view = with_view(x)
    return [y, view.requires_grad_()]  # it accumulates gradients


def test_a_view_without_a_graph_gets_no_gradient(two: Cluster) -> None:
    x = torch.arange(1.0, 5.0).requires_grad_()
    with autograd.context() as context_id:
        y, view = rpc.rpc_sync("w1", with_view, (x * 1,))
        assert view.requires_grad
        autograd.backward(context_id, [y.sum() + view.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2, 2, 2, 2]


def test_a_view_without_a_graph_gets_no_gradient_of_a_plain_pass() -> None:
    with cluster(2, rpc.Options(plain_backward=True)):
        x = torch.arange(1.0, 5.0).requires_grad_()
        for _ in range(2):
            y, view = rpc.rpc_sync("w1", with_view, (x * 1,))
            (y.sum() + view.sum()).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("is_enabled", [False, True])
def test_only_views_without_an_accumulator_have_no_edge(is_enabled: bool) -> None:
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        of_leaf = x[1:3].requires_grad_()
    tensors = [x, *with_view(x), *with_leaf(x), of_leaf, torch.ones(4)[1:3].requires_grad_()]
    assert all(each.requires_grad for each in tensors)
    with torch.set_grad_enabled(is_enabled):
        record = record_sent(1, 1, tensors)
    assert [edge is None for edge in edges_of(record)] == [False, False, True, False, False, False, False]
