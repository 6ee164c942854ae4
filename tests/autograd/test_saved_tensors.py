"""Gradients use the values of the forward pass, even if parameters change later."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from telegrad.autograd.consistency import saved_tensors
from telegrad.autograd.consistency.saved_tensors import Protection, reuse_storage, swap_storage


class OneWorker:
    """Subset of a worker that `saved_tensors` uses."""

    def __init__(self) -> None:
        self.attachments: dict[str, Any] = {}


@pytest.fixture
def protection() -> Protection:
    return Protection()


W = torch.arange(1.0, 10.0).reshape(3, 3)
X = torch.linspace(-1, 1, 6).reshape(2, 3)

USES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda w: w * w,
    "elementwise": lambda w: (w * X[0]) * w.sum(),
    "matmul": lambda w: X @ w @ w,
    "transposed": lambda w: F.linear(X, w) * F.linear(X, w.t()),
    "detached": lambda w: w * w.detach(),
    "view of a view": lambda w: w.view(9)[2:5].exp() * w[0],
    "output saved": lambda w: w.tanh() * w.exp(),
    "convolution": lambda w: F.conv1d(X.reshape(1, 2, 3), w.reshape(1, 9)[:, :6].reshape(1, 2, 3)) * w,
    "embedding": lambda w: F.embedding(torch.tensor([0, 2, 2]), w).pow(2),
    "twice": lambda w: (w * 2).mul(w).mul(w),
}


def gradient(use: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    (result,) = torch.autograd.grad(use(leaf).sum(), [leaf])
    return result


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("moves", [1, 2, 5])
def test_gradients_are_those_of_the_values_used(
    protection: Protection, use: Callable[[Tensor], Tensor], moves: int
) -> None:
    w = nn.Parameter(W.clone())
    with protection.handler_guard(1):
        y = use(w).sum()
    for _ in range(moves):
        swap_storage(w, w.data * 2 + 1)
    (got,) = torch.autograd.grad(y, [w], retain_graph=True)
    assert torch.equal(got, gradient(use, W))
    swap_storage(w, w.data * 2 + 1)
    (again,) = torch.autograd.grad(y, [w])
    assert torch.equal(again, got)


def test_without_protection_gradients_are_wrong() -> None:
    """Torch alone is silently wrong for operations that saved the parameter itself."""
    w = nn.Parameter(W.clone())
    y = USES["itself"](w).sum()
    w.data = w.data * 2
    (got,) = torch.autograd.grad(y, [w])
    assert not torch.equal(got, gradient(USES["itself"], W))


def test_two_contexts_over_two_values(protection: Protection) -> None:
    w = nn.Parameter(W.clone())
    with protection.handler_guard(1):
        y1 = USES["matmul"](w).sum()
    swap_storage(w, W + 1)
    with protection.handler_guard(2):
        y2 = USES["matmul"](w).sum()
    swap_storage(w, W + 2)
    assert torch.equal(torch.autograd.grad(y2, [w])[0], gradient(USES["matmul"], W + 1))
    assert torch.equal(torch.autograd.grad(y1, [w])[0], gradient(USES["matmul"], W))


def test_an_in_place_change_by_the_program_raises(protection: Protection) -> None:
    w = nn.Parameter(W.clone())
    with protection.handler_guard(1):
        y = USES["itself"](w).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*changed by the program itself"):
        torch.autograd.grad(y, [w])


def test_a_change_before_the_memory_was_replaced_raises(protection: Protection) -> None:
    w = nn.Parameter(W.clone())
    with protection.handler_guard(1):
        y = USES["itself"](w).sum()
    with torch.no_grad():
        w.add_(1)
    swap_storage(w, W)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, [w])


def test_a_change_afterwards_does_not_raise(protection: Protection) -> None:
    w = nn.Parameter(W.clone())
    with protection.handler_guard(1):
        y = USES["itself"](w).sum()
    swap_storage(w, W + 1)
    with torch.no_grad():
        w.add_(1)
    assert torch.equal(torch.autograd.grad(y, [w])[0], gradient(USES["itself"], W))


def test_an_activation_changed_in_place_raises(protection: Protection) -> None:
    w = nn.Parameter(W.clone())
    with protection.handler_guard(1):
        hidden = w * 2
        y = (hidden * hidden).sum()
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, [w])


def test_a_graph_outside_of_contexts_raises() -> None:
    w = nn.Parameter(W.clone())
    for use in (USES["itself"], USES["matmul"]):
        y = use(w).sum()
        swap_storage(w, W + 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_memory_that_is_used_again_is_checked_again(protection: Protection) -> None:
    w = nn.Parameter(W.clone())
    old = swap_storage(w, W + 1)
    reuse_storage(old)
    swap_storage(w, old)
    with protection.handler_guard(1):
        y = USES["itself"](w).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, [w])


def test_nothing_is_kept_alive(protection: Protection) -> None:
    w = nn.Parameter(W.clone())
    gc.disable()  # the alias of a result must not form a cycle with its node
    try:
        before = sum(type(thing) is Tensor for thing in gc.get_objects())
        with protection.handler_guard(1):
            y = USES["output saved"](w).sum()
        assert sum(type(thing) is Tensor for thing in gc.get_objects()) > before
        del y
        assert sum(type(thing) is Tensor for thing in gc.get_objects()) == before
    finally:
        gc.enable()


def test_second_derivatives(protection: Protection) -> None:
    w = nn.Parameter(W.clone())
    with protection.handler_guard(1):
        (first,) = torch.autograd.grad((w**3).sum(), [w], create_graph=True)
        y = first.sum()
    swap_storage(w, W * 5)
    (second,) = torch.autograd.grad(y, [w])
    assert torch.allclose(second, 6 * W)


def test_a_worker_without_an_optimizer_has_no_overhead() -> None:
    idle = OneWorker()
    assert saved_tensors.protection_of(idle) is None
    with saved_tensors.between_steps(idle):
        pass
    assert not idle.attachments


def test_functional_transforms_need_unprotected_tensors(protection: Protection) -> None:
    def slope() -> Tensor:
        return torch.func.grad(lambda x: (x * x).sum())(X)

    with protection.handler_guard(1):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            slope()
        with saved_tensors.unprotected():
            assert torch.equal(slope(), 2 * X)
        w = nn.Parameter(W.clone())
        y = (w * w).sum()
    swap_storage(w, W + 1)
    assert torch.equal(torch.autograd.grad(y, [w])[0], 2 * W)


def test_memory_shared_with_other_processes_is_copied(protection: Protection) -> None:
    protection.copies_shared = True
    w = nn.Parameter(W.clone())
    w.share_memory_()
    with protection.context_guard(1):
        y = USES["matmul"](w).sum()
    with torch.no_grad():
        w.add_(1)
    assert torch.equal(torch.autograd.grad(y, [w])[0], gradient(USES["matmul"], W))
