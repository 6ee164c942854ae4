"""Saved-tensor hooks belong to the coroutine that entered them, not to its thread."""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd.consistency.saved_tensors import protect
from telegrad.testing import Cluster, Gate, assert_quiescent, eventually

pytestmark = pytest.mark.usefixtures("quiet")

LEAF = torch.ones(2, requires_grad=True)


def is_hooked() -> bool:
    """Return whether saved-tensor hooks are active."""
    node: Any = (LEAF * LEAF).grad_fn
    return node._saved_self is not LEAF


async def with_hooks(gate: Gate) -> list[bool]:
    seen = [is_hooked()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        seen.append(is_hooked())
        gate.entered.release()
        while not gate.is_open():
            await asyncio.sleep(0)
        seen.append(is_hooked())
    await asyncio.sleep(0)
    return [*seen, is_hooked()]


async def without_hooks() -> list[bool]:
    seen = [is_hooked()]
    await asyncio.sleep(0)
    return [*seen, is_hooked()]


def test_hooks_stay_with_the_coroutine(two: Cluster) -> None:
    gate = Gate()
    first = rpc.rpc_async("w1", with_hooks, (gate,))
    gate.wait_for()
    assert rpc.rpc_sync("w1", without_hooks) == [False, False]
    gate.open()
    assert first.wait() == [False, True, True, False]


async def opens_a_context(gate: Gate) -> list[bool]:
    with autograd.context():
        seen = [is_hooked()]
        gate.entered.release()
        while not gate.is_open():
            await asyncio.sleep(0)
        seen.append(is_hooked())
    return [*seen, is_hooked()]


def test_stepped_parameters_hook_only_code_in_contexts(two: Cluster) -> None:
    step_gate = protect(two[1]._worker).gate
    gate = Gate()
    first = rpc.rpc_async("w1", opens_a_context, (gate,))
    gate.wait_for()
    assert rpc.rpc_sync("w1", without_hooks) == [False, False]
    with autograd.context():
        assert rpc.rpc_sync("w1", is_hooked)
        assert rpc.rpc_sync("w1", without_hooks) == [True, True]
        assert not is_hooked()  # nothing is stepped on this worker
    assert not rpc.rpc_sync("w1", is_hooked)
    assert step_gate.bodies == 1
    gate.open()
    assert first.wait() == [True, True, False]
    assert step_gate.bodies == 0
    eventually(lambda: step_gate.handlers == 0)  # the answer leaves before the handler is out of the gate
    del first
    for worker in two:
        assert_quiescent(worker)


def squared(x: Tensor) -> Tensor:
    raise ValueError(f"hooked: {is_hooked()}, {x.sum()}")


def test_a_handler_that_fails_leaves_no_hooks(two: Cluster) -> None:
    step_gate = protect(two[1]._worker).gate
    with autograd.context():
        for _ in range(3):
            with pytest.raises(ValueError, match="hooked: True"):
                rpc.rpc_sync("w1", squared, (torch.ones(2, requires_grad=True),))
    eventually(lambda: step_gate.handlers == 0)
    assert not rpc.rpc_sync("w1", is_hooked)
