"""Gradients of backward passes over workers."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.testing import Cluster, Gate, eventually, run_all


def leaf(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def no_leaks(four: Cluster) -> Iterator[None]:
    yield
    for worker in four:
        eventually(lambda worker=worker: not any(worker._worker.autograd.left().values()))  # type: ignore[misc]


def table(worker: Any) -> dict[int, Any]:
    return worker._worker.autograd.contexts.table  # type: ignore[no-any-return]


WEIGHT = leaf(3, 3)


def through(x: Tensor, *way: str) -> Tensor:
    """Apply a layer on each worker of `way`, in nested calls."""
    y = x @ WEIGHT
    return rpc.rpc_sync(way[0], through, (y, *way[1:])) + y if way else y


def locally(x: Tensor, depth: int) -> Tensor:
    y = x @ WEIGHT
    return locally(y, depth - 1) + y if depth else y


def weight_gradient(context_id: int) -> Tensor | None:
    return autograd.get_gradients(context_id).get(WEIGHT)


# ---- gradients


@pytest.mark.parametrize("way", [("w1",), ("w0",), ("w1", "w2"), ("w1", "w0", "w1"), ("w1", "w2", "w3", "w1")])
def test_gradients_are_those_of_one_process(four: Cluster, way: tuple[str, ...]) -> None:
    x = leaf(2, 3)
    expected = torch.autograd.grad(locally(x, len(way) - 1).sum(), [x, WEIGHT])
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(way[0], through, (x, *way[1:])).sum()
        autograd.backward(context_id, [loss])
        assert torch.allclose(autograd.get_gradients(context_id)[x], expected[0])
        parts = [rpc.rpc_sync(name, weight_gradient, (context_id,)) for name in sorted(set(way))]
        assert torch.allclose(sum(part for part in parts if part is not None), expected[1])  # type: ignore[arg-type]
    assert x.grad is WEIGHT.grad is None


def test_a_pass_over_two_workers_is_one_call(four: Cluster) -> None:
    x = leaf(2, 3)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", through, (x,)).sum()
        engines = [four[rank]._worker.engine for rank in (0, 1)]
        before = [engine.stats()["sent_messages"] for engine in engines]
        autograd.backward(context_id, [loss])
        assert [engine.stats()["sent_messages"] for engine in engines] == [before[0] + 1, before[1] + 1]
        assert x in autograd.get_gradients(context_id)


def test_passes_accumulate_and_finished_ones_are_removed(four: Cluster) -> None:
    x = leaf(2, 3)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", through, (x, "w2")).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        once = autograd.get_gradients(context_id)[x].clone()
        for _ in range(8):
            autograd.backward(context_id, [loss], retain_graph=True)
        autograd.backward(context_id, [loss])
        assert torch.allclose(autograd.get_gradients(context_id)[x], once * 10)
        assert [len(table(worker)[context_id].passes) for worker in four.workers[:3]] == [0, 1, 1]
        with pytest.raises(RuntimeError, match="second time"):
            autograd.backward(context_id, [loss])


def test_a_pass_does_not_wait_for_unused_values(four: Cluster) -> None:
    x = leaf(2, 3)
    with autograd.context() as context_id:
        rpc.rpc_sync("w1", through, (x, "w2"))
        y = rpc.rpc_sync("w1", through, (x,))
        rpc.rpc_sync("w2", through, (y,))
        autograd.backward(context_id, [y.sum()])
        assert torch.allclose(autograd.get_gradients(context_id)[x], WEIGHT.sum(1).expand(2, 3))


@pytest.mark.parametrize("threads", [4])
def test_many_at_once(four: Cluster, threads: int) -> None:
    def work(rank: int) -> None:
        for _ in range(20):
            x = leaf(2, 3)
            with autograd.context() as context_id:
                a, b = f"w{(rank + 1) % 4}", f"w{(rank + 2) % 4}"
                loss = rpc.rpc_sync(a, through, (x, b)).sum() + rpc.rpc_sync(b, through, (x,)).sum()
                autograd.backward(context_id, [loss])
                found = autograd.get_gradients(context_id)[x]
            expected = torch.autograd.grad(locally(x, 1).sum() + locally(x, 0).sum(), [x])[0]
            assert torch.allclose(found, expected)

    def on(rank: int) -> Any:
        def run() -> None:
            with four[rank]:
                work(rank)

        return run

    run_all([on(rank) for rank in range(4) for _ in range(threads)])


def test_two_threads_in_one_context(four: Cluster) -> None:
    x = leaf(2, 3)
    with autograd.context() as context_id:
        losses = [rpc.rpc_sync("w1", through, (x, "w2")).sum() for _ in range(8)]

        def run(loss: Tensor) -> Any:
            def one() -> None:
                with four[0]:
                    autograd.backward(context_id, [loss])

            return one

        run_all([run(loss) for loss in losses])
        expected = torch.autograd.grad(locally(x, 1).sum(), [x])[0] * 8
        assert torch.allclose(autograd.get_gradients(context_id)[x], expected)


async def trained(x: Tensor) -> Tensor:
    with autograd.context() as context_id:
        loss = (await rpc.rpc_async("w1", through, (x,))).sum()
        await asyncio.to_thread(autograd.backward, context_id, [loss])
        return autograd.get_gradients(context_id)[x]


def test_in_coroutines(four: Cluster) -> None:
    x = leaf(2, 3)
    for gradient in (asyncio.run(trained(x)), rpc.rpc_sync("w2", trained, (x,))):
        assert torch.allclose(gradient, WEIGHT.sum(1).expand(2, 3))


class Gated(torch.autograd.Function):
    """Identity with a backward function that waits for a gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Gate) -> Tensor:
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.gate.enter()
        return gradients[0], None


def gated(x: Tensor, gate: Gate) -> Tensor:
    return Gated.apply(x, gate).sum()  # type: ignore[no-any-return, no-untyped-call]


async def begin(way: str, gate: Gate) -> Tensor:
    """Run a pass over w1 in one of three ways, and return the gradient."""
    x = leaf(3)
    if way == "context":
        with autograd.context() as context_id:
            loss = await rpc.rpc_async("w1", gated, (x, gate))
            with pytest.raises(RuntimeError, match="a backward pass would block the event loop of worker 'w2'"):
                autograd.backward(context_id, [loss])
            await asyncio.to_thread(autograd.backward, context_id, [loss])
            return autograd.get_gradients(context_id)[x]
    with autograd.plain():
        loss = await rpc.rpc_async("w1", gated, (x, gate))
    if way == "grad":
        with pytest.raises(RuntimeError, match="a backward pass would block the event loop of worker 'w2'"):
            torch.autograd.grad(loss, [x])
        return (await asyncio.to_thread(torch.autograd.grad, loss, [x]))[0]
    with pytest.raises(RuntimeError, match="a backward pass would block the event loop of worker 'w2'"):
        loss.backward()
    await asyncio.to_thread(loss.backward)
    assert x.grad is not None
    return x.grad


async def open_gate(gate: Gate) -> None:
    gate.open()


@pytest.mark.parametrize("way", ["context", "backward", "grad"])
def test_an_event_loop_refuses_a_pass_and_serves_while_a_thread_runs_it(four: Cluster, way: str) -> None:
    gate = Gate()
    gradient = rpc.rpc_async("w2", begin, (way, gate))
    gate.wait_for()
    rpc.rpc_sync("w2", open_gate, (gate,))
    assert torch.equal(gradient.wait(), torch.ones(3, dtype=torch.float64))


async def begin_locally(x: Tensor) -> Tensor:
    with autograd.context() as context_id:
        await rpc.rpc_async("w1", through, (x,))
        autograd.backward(context_id, [(x * 2).sum()])
        return autograd.get_gradients(context_id)[x]


def test_an_event_loop_runs_a_pass_without_received_tensors(four: Cluster) -> None:
    x = leaf(2, 3)
    assert torch.equal(rpc.rpc_sync("w2", begin_locally, (x,)), torch.full_like(x, 2))


# ---- roots


def test_values_that_are_no_root_raise(four: Cluster) -> None:
    with autograd.context() as context_id:
        for wrong in (None, leaf(), [leaf(), 1]):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                autograd.backward(context_id, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="incompatible function arguments"):
            autograd.backward(None, [leaf()])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="incompatible function arguments"):
            autograd.get_gradients("1")  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="No tensors provided for gradient computation"):
            autograd.backward(context_id, [])
        with pytest.raises(RuntimeError, match="requires_grad not set on root"):
            autograd.backward(context_id, [torch.ones(())])
        with pytest.raises(RuntimeError, match="is not a scalar, all roots need to be scalar"):
            autograd.backward(context_id, [leaf(2) * 1])
        with pytest.raises(RuntimeError, match="does not have a valid gradient function"):
            autograd.backward(context_id, [leaf()])
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        autograd.backward(context_id, [leaf() * 1])


def scalar(x: Tensor) -> Tensor:
    return (x * 2).sum()


def test_a_reference_as_root(four: Cluster) -> None:
    x = leaf(3)
    with autograd.context() as context_id:
        rref = rpc.remote("w1", scalar, (x,))
        rref.backward(context_id, retain_graph=True)
        rref.backward(context_id)
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 4.0, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id'"):
            rref.backward()
        with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for .backward\(\)"):
            rpc.remote("w1", str).backward(context_id)
        mine = rpc.RRef(rpc.rpc_sync("w1", scalar, (x,)))
        mine.backward(context_id)
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 6.0, dtype=torch.float64))
        del rref, mine
    y = leaf(3)
    rpc.RRef((y * 3).sum()).backward()
    assert torch.equal(y.grad, torch.full((3,), 3.0, dtype=torch.float64))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="RRef should contain a tensor"):
        rpc.RRef("foo").backward()
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 100"):
        rpc.RRef(scalar(x)).backward(100)


class Layer:
    """Holds a weight on a worker."""

    def __init__(self, x: Tensor) -> None:
        self.y = x * 2

    def value(self) -> Tensor:
        return self.y


@pytest.mark.parametrize("size", [3, 100_000])  # a large request also has the reference in its metadata
def test_a_creation_in_a_context_is_recorded_by_the_native_client(
    four: Cluster, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf(size)
    rpc.rpc_sync("w1", Layer, (torch.zeros(1),))  # its name is known
    messages = type(four[0]._worker.messages)
    encode, caller = messages.encode, threading.get_ident()

    def not_by_the_caller(*args: Any, **kwargs: Any) -> Any:
        assert threading.get_ident() != caller
        return encode(*args, **kwargs)

    with autograd.context() as context_id:
        with monkeypatch.context() as patch:
            patch.setattr(messages, "encode", not_by_the_caller)
            layer = rpc.remote("w1", Layer, (x,))
        autograd.backward(context_id, [layer.rpc_sync().value().sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full_like(x, 2))


def add_view(a: Tensor, b: Tensor) -> Tensor:
    """Add `a` and a view of `b`: one gradient is a view of the other."""
    return a + b.t().t()


def test_gradients_that_arrive_in_one_storage_are_kept_apart(four: Cluster) -> None:
    a, b = leaf(3, 3), leaf(3, 3)
    with autograd.context() as context_id:
        loss = (rpc.rpc_sync("w1", add_view, (a, b)) * torch.rand(3, 3, dtype=torch.float64)).sum()
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)
        expected = gradients[b].clone()
        gradients[a].zero_()
        assert torch.equal(gradients[b], expected)
