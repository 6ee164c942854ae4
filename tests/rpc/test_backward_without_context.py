"""Warnings of `loss.backward()` over received tensors without an autograd context."""

import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.serialize import cut_graphs

pytestmark = pytest.mark.usefixtures("two", "quiet")

WEIGHT = torch.ones(3, requires_grad=True)


def forward(x: Tensor) -> Tensor:
    return WEIGHT * x


def forward_in_parts(x: Tensor) -> dict[str, Any]:
    return {"y": WEIGHT * x, "not plain": {1, 2}}


def relay(x: Tensor) -> Tensor:
    return rpc.rpc_sync("w0", forward, (x,))


def relay_in_parts(x: Tensor) -> dict[str, Any]:
    return rpc.rpc_sync("w0", forward_in_parts, (x,))


GATE = threading.Event()


def hold(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    assert GATE.wait(20)
    return function(x)


def weight() -> Tensor:
    return WEIGHT


def step(y: Tensor) -> None:
    y.sum().backward()


@pytest.fixture(autouse=True)
def warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_graphs, "_has_warned", False)
    GATE.clear()


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "sync": lambda x: rpc.rpc_sync("w1", forward, (x,)),
    "async": lambda x: rpc.rpc_async("w1", forward, (x,)).wait(),
    "to_here": lambda x: rpc.remote("w1", forward, (x,)).to_here(),
    "relayed": lambda x: rpc.rpc_sync("w1", relay, (x,)),
    "relayed, pickled": lambda x: rpc.rpc_sync("w1", relay_in_parts, (x,))["y"],
    "pickled": lambda x: rpc.rpc_sync("w1", forward_in_parts, (x,))["y"],
}


@pytest.mark.parametrize("way", WAYS)
def test_gradient_that_ends_at_a_received_tensor_warns_once(way: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            y = WAYS[way](torch.ones(3))
            assert y.is_leaf
            (2 * y).sum().backward()  # here
            assert y.grad is not None
            assert y.grad.tolist() == [2, 2, 2]
    assert len(said) == 1
    assert issubclass(said[0].category, UserWarning)
    assert re.search(r"that worker trains nothing.*with telegrad\.autograd\.context\(\)", str(said[0].message))
    assert said[0].filename == __file__
    with open(__file__) as f:
        assert f.readlines()[said[0].lineno - 1].rstrip().endswith("# here")


def test_callee_warns_of_the_callers_graph() -> None:
    with pytest.warns(UserWarning, match="that worker trains nothing"):
        rpc.rpc_sync("w1", step, (torch.ones(3, requires_grad=True) * 2,))


def test_passes_that_lose_no_gradient_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = rpc.rpc_sync("w1", weight)  # a leaf of this worker
        copy.sum().backward()
        assert copy.grad is not None
        y = rpc.rpc_sync("w1", forward, (torch.ones(3),))
        (gradient,) = torch.autograd.grad(y.sum(), y)  # the program computes it
        assert gradient.tolist() == [1, 1, 1]
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("w1", forward, (torch.ones(3, requires_grad=True),)).sum()])


def test_plain_backward_within_a_context_raises() -> None:
    with autograd.context(), pytest.raises(RuntimeError, match=r"instead of loss\.backward\(\)|backward"):
        rpc.rpc_sync("w1", forward, (torch.ones(3),)).sum().backward()


def test_watched_tensors_can_be_sent_and_saved(tmp_path: Any) -> None:
    y = rpc.rpc_sync("w1", forward, (torch.ones(3),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(y, tmp_path / "y")
        assert torch.equal(rpc.rpc_sync("w1", forward, (y,)), y)
        assert torch.equal(y.clone(), y)


@pytest.mark.parametrize("function", [forward, forward_in_parts])
def test_a_reply_after_the_end_of_its_context_warns(function: Any) -> None:
    with autograd.context():
        future = rpc.rpc_async("w1", hold, (function, torch.ones(3)))
    GATE.set()
    value = future.wait()
    y = value["y"] if isinstance(value, dict) else value
    assert (y.is_leaf, y.requires_grad) == (True, True)
    with pytest.warns(UserWarning, match="that worker trains nothing"):
        y.sum().backward()
    assert y.grad.tolist() == [1, 1, 1]
