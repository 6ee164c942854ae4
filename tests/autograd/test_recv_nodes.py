"""Gradients of received tensors, and hooks that run during the pass."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_group import Group
from torch import Tensor


def leaf() -> Tensor:
    return torch.rand(3, requires_grad=True)


def received(*leaves: Tensor) -> tuple[Group, list[Tensor]]:
    """Send leaves from worker 0 to worker 1 in one message."""
    group = Group(2, 0)
    return group, group.transfer(0, 1, leaves)


def gradient_of(group: Group, x: Tensor) -> Tensor:
    return group.contexts[0].gradients[x]


def test_under_no_grad_inference_mode_and_another_default_device() -> None:
    x = leaf()
    group, (there,) = received(x)
    loss = (there * 2).sum()
    with torch.no_grad(), torch.device("meta"):
        group.backward(1, [loss], retain_graph=True)
    with torch.inference_mode():
        group.backward(1, [loss])
    assert torch.equal(gradient_of(group, x), torch.full((3,), 4.0))


def test_tensors_of_a_message_without_gradient() -> None:
    x, y, z = leaf(), leaf(), leaf()
    group, (a, _, c) = received(x, y, z)
    group.backward(1, [(a * 2 + c).sum()])
    assert set(group.contexts[0].gradients) == {x, z}


def test_leaves_keep_their_grad() -> None:
    x, w = leaf(), leaf()
    w.grad = torch.ones(3)
    group, (there,) = received(x)
    group.backward(1, [(there * w).sum()])
    assert torch.equal(w.grad, torch.ones(3))
    assert torch.equal(group.contexts[1].gradients[w], x)


def test_a_function_in_place_on_a_view() -> None:
    """Torch's node for such a view contains the node of the Function."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    x = leaf()
    group, (there,) = received(x)
    y = there * 2
    Twice.apply(y[:2])
    group.backward(1, [y.sum()])
    assert torch.equal(gradient_of(group, x), torch.tensor([4.0, 4.0, 2.0]))


def test_hooks_of_the_tensor_run_and_those_of_its_node_do_not() -> None:
    x, seen = leaf(), []
    group, (there,) = received(x)
    there.register_hook(lambda grad: (seen.append("tensor"), grad * 10)[1])
    there.grad_fn.register_hook(lambda _ins, _outs: seen.append("node"))  # type: ignore[union-attr]
    there.retain_grad()
    group.backward(1, [(there * 2).sum()])
    assert seen == ["tensor"]
    assert torch.equal(gradient_of(group, x), torch.full((3,), 20.0))
    assert torch.equal(there.grad, torch.full((3,), 20.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("reached", [True, False])
def test_a_local_backward_in_a_hook_is_rejected(reached: bool) -> None:
    """Whether the outer pass reaches the tensor of the inner one does not matter."""
    x, y = leaf(), leaf()
    group, (there,) = received(x)
    other = group.transfer(0, 1, [y])[0]
    errors: list[str] = []

    def stray(_: Tensor) -> None:
        with torch.enable_grad():
            loss = ((there if reached else other) * 7).sum()
        with pytest.raises(RuntimeError) as info:
            loss.backward()
        errors.append(str(info.value))

    last = there * 2
    last.register_hook(stray)
    group.backward(1, [(last + other * 0).sum()])
    assert len(errors) == 1
    assert "continues on another worker" in errors[0]
    assert torch.equal(gradient_of(group, x), torch.full((3,), 2.0))
    assert torch.equal(gradient_of(group, y), torch.zeros(3))


def test_a_pass_in_a_hook_of_another() -> None:
    x, y = leaf(), leaf()
    outer, (there,) = received(x)
    inner, (other,) = received(y)
    middle = there * 1
    loss = (other * 3).sum()

    def other_pass(_: Tensor) -> None:
        inner.backward(1, [loss])

    middle.register_hook(other_pass)
    outer.backward(1, [(middle * 2).sum()])
    assert torch.equal(gradient_of(outer, x), torch.full((3,), 2.0))
    assert torch.equal(gradient_of(inner, y), torch.full((3,), 3.0))


def test_passes_of_two_threads_over_one_graph_at_once() -> None:
    x = leaf()
    group, (there,) = received(x)
    inside, other_done = threading.Event(), threading.Event()
    middle = there * 1

    def wait(_: Tensor) -> None:
        if not inside.is_set():  # the first of the two threads
            inside.set()
            assert other_done.wait(60)

    middle.register_hook(wait)
    sent: list[float] = []
    group.on_send = lambda _src, _dst, message: sent.append(message[4][0][0].item())
    first, second = [(middle * factor).sum() for factor in (1, 100)]
    thread = threading.Thread(target=group.begin, args=(1, [first], True))
    thread.start()
    assert inside.wait(60)
    group.begin(1, [second], True)
    other_done.set()
    thread.join()
    assert sent == [100.0, 1.0]
    group.settle()
    assert torch.equal(gradient_of(group, x), torch.full((3,), 101.0))


@pytest.mark.parametrize("make", [lambda x: x.to_sparse(), lambda x: x.half(), lambda x: x.to(torch.complex64)])
def test_other_kinds_of_tensors(make: Callable[[Tensor], Tensor]) -> None:
    x = leaf()
    group, (there,) = received(make(x))
    back = there.to_dense() if there.layout is torch.sparse_coo else there
    group.backward(1, [(back * 2).abs().float().sum()])
    assert torch.allclose(gradient_of(group, x), torch.full((3,), 2.0))
