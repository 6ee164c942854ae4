"""Saved-tensor hooks belong to the coroutine that entered them, not to the thread that it shares with others."""

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
    """Are tensors saved as something else than themselves?"""
    node: Any = (LEAF * LEAF).grad_fn
    return node._saved_self is not LEAF


async def under_own_hooks(door: Gate) -> list[bool]:
    seen = [is_hooked()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        seen.append(is_hooked())
        door.entered.release()
        while not door.is_open():
            await asyncio.sleep(0)
        seen.append(is_hooked())
    await asyncio.sleep(0)
    return [*seen, is_hooked()]


async def plainly() -> list[bool]:
    seen = [is_hooked()]
    await asyncio.sleep(0)
    return [*seen, is_hooked()]


def test_hooks_stay_with_the_coroutine(two: Cluster) -> None:
    door = Gate()
    first = rpc.rpc_async("w1", under_own_hooks, (door,))
    door.wait_for()
    assert rpc.rpc_sync("w1", plainly) == [False, False]
    door.open()
    assert first.wait() == [False, True, True, False]


async def opens_a_context(door: Gate) -> list[bool]:
    with autograd.context():
        seen = [is_hooked()]
        door.entered.release()
        while not door.is_open():
            await asyncio.sleep(0)
        seen.append(is_hooked())
    return [*seen, is_hooked()]


def test_where_parameters_are_stepped_code_in_contexts_is_hooked_and_nothing_else(two: Cluster) -> None:
    gate = protect(two[1]._worker).gate
    door = Gate()
    first = rpc.rpc_async("w1", opens_a_context, (door,))
    door.wait_for()
    assert rpc.rpc_sync("w1", plainly) == [False, False]
    with autograd.context():
        assert rpc.rpc_sync("w1", is_hooked)
        assert rpc.rpc_sync("w1", plainly) == [True, True]
        assert not is_hooked()  # nothing is stepped on this worker
    assert not rpc.rpc_sync("w1", is_hooked)
    assert gate.bodies == 1
    door.open()
    assert first.wait() == [True, True, False]
    assert gate.bodies == 0
    eventually(lambda: gate.handlers == 0)  # the answer leaves before the handler is out of the gate
    del first
    for worker in two:
        assert_quiescent(worker)


def squared(x: Tensor) -> Tensor:
    raise ValueError(f"hooked: {is_hooked()}, {x.sum()}")


def test_a_handler_that_fails_leaves_no_hooks(two: Cluster) -> None:
    gate = protect(two[1]._worker).gate
    with autograd.context():
        for _ in range(3):
            with pytest.raises(ValueError, match="hooked: True"):
                rpc.rpc_sync("w1", squared, (torch.ones(2, requires_grad=True),))
    eventually(lambda: gate.handlers == 0)
    assert not rpc.rpc_sync("w1", is_hooked)
