"""Local passes to inputs, refused if their gradients would be incomplete."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc

pytestmark = pytest.mark.usefixtures("four")


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def doubled(x: Tensor) -> Tensor:
    return rpc.rpc_sync("w1", torch.mul, (x, 2.0))


@pytest.mark.parametrize(
    "run",
    [
        lambda loss, w: torch.autograd.grad(loss, w),
        lambda loss, w: torch.autograd.grad(loss, [leaf(), w], allow_unused=True),
        lambda loss, w: loss.backward(inputs=[w]),
    ],
    ids=["grad", "among others", "backward"],
)
@pytest.mark.parametrize("is_leaf", [True, False])
def test_an_input_that_was_sent_is_refused(run: Callable[[Tensor, Tensor], object], is_leaf: bool) -> None:
    w = leaf() if is_leaf else leaf() * 3
    with autograd.context():
        loss = (doubled(w) + w).sum()
        with pytest.raises(RuntimeError, match=r"telegrad\.autograd\.backward\(context_id"):
            run(loss, w)
    assert not is_leaf or w.grad is None


def test_an_input_below_one_that_was_sent_is_refused() -> None:
    w = leaf()
    with autograd.context(), pytest.raises(RuntimeError, match="detach"):
        torch.autograd.grad((doubled(w * 3) + w).sum(), w)


def test_a_received_input_is_refused_only_if_it_was_sent_on() -> None:
    w = leaf()
    with autograd.context():
        y = doubled(w)
        assert torch.autograd.grad((y * 5).sum(), y)[0].tolist() == [5, 5]
        h = y * 3
        assert torch.autograd.grad((h * y * w).sum(), h)[0].tolist() == [2, 2]
        loss = (doubled(y) + y).sum()
        with pytest.raises(RuntimeError, match="continues on another worker"):
            torch.autograd.grad(loss, y)


def test_other_inputs_are_not_refused() -> None:
    w, own = leaf(), leaf()
    with autograd.context():
        y = doubled(w)
        assert torch.autograd.grad((y * own).sum(), own)[0].tolist() == [2, 2]
        (y * own).sum().backward(inputs=[own])
        assert torch.autograd.grad((w * w).sum(), w)[0].tolist() == [2, 2]  # without a received tensor
        assert torch.autograd.grad((y.detach() * w).sum(), w)[0].tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(torch.ones(1), w)
    assert own.grad is not None
    assert own.grad.tolist() == [2, 2]


def penalty(x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    return gradient.square().sum()


def test_a_handler_differentiates_what_it_has_received() -> None:
    w = leaf()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", penalty, (w,))])
        assert autograd.get_gradients(context_id)[w].tolist() == [8, 8]
