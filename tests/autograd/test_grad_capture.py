"""Recv nodes deliver their gradients only to the engine call prepared for them."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from simulated_group import Group
from torch import Tensor

from telegrad.autograd.execution import grad_capture
from telegrad.autograd.execution.grad_capture import EngineCall
from telegrad.autograd.recording import record_received


@pytest.fixture(autouse=True)
def none_active() -> Iterator[None]:
    yield
    assert not grad_capture._active_calls


def received() -> Tensor:
    return Group(2, 0).transfer(0, 1, [torch.rand(3, requires_grad=True)])[0]


def run(call: EngineCall, root: Tensor) -> None:
    torch.autograd.backward([call.leaf, root.sum()], [call.gradient, torch.ones(())])


def test_a_call_gets_the_gradients_of_its_nodes() -> None:
    there, unreached = received(), received()
    with EngineCall([there.grad_fn, unreached.grad_fn]) as call:
        run(call, there * 2)
        ((gradient,), none) = call.captured.values()
    assert torch.equal(gradient, torch.full((3,), 2.0))
    assert none is None


def test_an_unexpected_node_is_rejected() -> None:
    there = received()
    with EngineCall([]) as call:
        with pytest.raises(RuntimeError, match="continues on another worker"):
            run(call, there)
        assert not call.captured


@pytest.mark.parametrize("reached", [True, False])
def test_a_local_backward_in_a_hook_is_rejected_and_captures_nothing(reached: bool) -> None:
    there, other = received(), received()
    errors: list[RuntimeError] = []

    def stray(_: Tensor) -> None:
        with torch.enable_grad(), pytest.raises(RuntimeError, match="continues on another worker") as info:
            ((there if reached else other) * 7).sum().backward()
        errors.append(info.value)

    middle = there * 1
    middle.register_hook(stray)
    with EngineCall([there.grad_fn, other.grad_fn]) as call:
        run(call, middle * 2)
        assert len(errors) == 1
        assert torch.equal(call.captured[there.grad_fn][0], torch.full((3,), 2.0))  # type: ignore[index]
        assert call.captured[other.grad_fn] is None


def test_a_nested_call_over_the_same_node_captures_separately() -> None:
    there = received()
    inner: list[Any] = []

    def nested(_: Tensor) -> None:
        with torch.enable_grad(), EngineCall([there.grad_fn]) as call:
            run(call, there * 5)
            inner.append(call.captured[there.grad_fn])

    middle = there * 1
    middle.register_hook(nested)
    with EngineCall([there.grad_fn]) as call:
        run(call, middle * 2)
        assert torch.equal(call.captured[there.grad_fn][0], torch.full((3,), 2.0))  # type: ignore[index]
    assert torch.equal(inner[0][0], torch.full((3,), 5.0))


def test_the_hook_runs_before_recvs_on_the_queue_of_the_thread() -> None:
    """Tensors on `meta` share it with those on the CPU."""
    there = torch.rand(3, device="meta", requires_grad=True)
    _, (received,) = record_received(7, 0, [there])
    with EngineCall([received.grad_fn]) as call:
        torch.autograd.backward([call.leaf, received.sum()], [call.gradient, torch.ones((), device="meta")])
        (gradients,) = call.captured.values()
    assert gradients is not None
    assert gradients[0].device.type == "meta"


def test_it_works_in_every_thread_and_mode() -> None:
    there = received()
    with ExitStack() as stack:
        for mode in (torch.inference_mode(), torch.no_grad(), torch.device("meta")):
            stack.enter_context(mode)
        call = stack.enter_context(EngineCall([there.grad_fn]))
        assert not call.leaf.is_inference()
        assert call.leaf.requires_grad
        assert call.leaf.device.type == "cpu"
