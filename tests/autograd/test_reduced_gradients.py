"""DistributedDataParallel: the reducer's result is the gradient in the context."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated_group import Group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def alone() -> Iterator[None]:
    """Start a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def threefold(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook that triples all gradients, to show that the reducer ran."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 3)
    return future


def replicated(module: nn.Module, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module, **options)
    ddp.register_comm_hook(None, threefold)
    return ddp


def loss_of(group: Group, module: nn.Module, x: Tensor, table: Tensor) -> Tensor:
    """Return the loss of a remote table's row, through a module at worker 0."""
    (fetched,) = group.transfer(1, 0, [table * 2])
    found: Tensor = module(x + fetched)
    return found.sum()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_reduced_gradients_are_in_the_context(alone: None, options: dict[str, bool]) -> None:
    single = nn.Linear(4, 4)
    table = torch.rand(3, 4, requires_grad=True)
    x = torch.rand(3, 4, requires_grad=True)
    single(x + table * 2).sum().backward()
    expected = {name: parameter.grad for name, parameter in single.named_parameters()}
    of_the_table = table.grad
    assert of_the_table is not None
    single.zero_grad()
    table.grad = x.grad = None
    ddp = replicated(single, **options)
    single.weight.grad = torch.full_like(single.weight, 9)
    for _ in range(2):
        group = Group(2, 0)
        group.backward(0, [loss_of(group, ddp, x, table)])
        gradients = group.contexts[0].gradients
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[parameter], 3 * expected[name])
        torch.testing.assert_close(group.contexts[1].gradients[table], of_the_table)
        assert x in gradients
        assert torch.equal(single.weight.grad, torch.full_like(single.weight, 9))
        assert single.bias.grad is None
        assert x.grad is None


def test_a_reduction_does_not_change_earlier_results(alone: None) -> None:
    single = nn.Linear(4, 4)
    ddp = replicated(single, gradient_as_bucket_view=True)
    table = torch.rand(3, 4, requires_grad=True)
    first, second = Group(2, 0), Group(2, 1)
    first.backward(0, [loss_of(first, ddp, torch.ones(3, 4), table)])
    kept = first.contexts[0].gradients[single.weight]
    before = kept.clone()
    second.backward(0, [loss_of(second, ddp, torch.zeros(3, 4), table)])
    assert torch.equal(kept, before)
    assert not torch.equal(second.contexts[0].gradients[single.weight], before)


def test_a_stage_in_the_middle(alone: None) -> None:
    """The module is at worker 1, between a call and its reply; a part bypasses it."""
    single = nn.Linear(4, 4)
    ddp = replicated(single)
    seen: list[Tensor] = []
    single.weight.register_hook(lambda grad: seen.append(grad.clone()))
    group, x = Group(2, 0), torch.rand(3, 4, requires_grad=True)
    (there,) = group.transfer(0, 1, [x * 2])
    back, also = group.transfer(1, 0, [ddp(there) + there, there * 5])
    (again,) = group.transfer(0, 1, [back])
    (last,) = group.transfer(1, 0, [again + there])
    group.backward(0, [last.sum() + also.sum()])
    weight, bias = single.weight.detach(), single.bias.detach()
    local_weight, local_bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    y = x.detach().clone().requires_grad_()
    value = y * 2
    (nn.functional.linear(value, local_weight, local_bias) + value + value + value * 5).sum().backward()
    assert local_weight.grad is not None
    assert local_bias.grad is not None
    torch.testing.assert_close(group.contexts[1].gradients[single.weight], 3 * local_weight.grad)
    torch.testing.assert_close(group.contexts[1].gradients[single.bias], 3 * local_bias.grad)
    torch.testing.assert_close(group.contexts[0].gradients[x], y.grad)
    assert len(seen) == 1, "a tensor hook of a managed parameter fires once"
    assert single.weight.grad is None


def test_an_error_leaves_grad_unchanged(alone: None) -> None:
    single = nn.Linear(4, 4)
    ddp = replicated(single)
    single.weight.grad = torch.ones_like(single.weight)

    def fail(grad: Tensor) -> None:
        raise ValueError("in a hook")

    single.bias.register_hook(fail)
    group = Group(2, 0)
    with pytest.raises(ValueError, match="in a hook"):
        group.backward(0, [loss_of(group, ddp, torch.ones(3, 4), torch.rand(3, 4, requires_grad=True))])
    assert torch.equal(single.weight.grad, torch.ones_like(single.weight))
    assert not group.contexts[0].gradients
