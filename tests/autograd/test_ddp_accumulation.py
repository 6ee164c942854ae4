"""Passes of DistributedDataParallel that add up, or leave parameters unused.

Each program runs over workers and, with the same inputs, in one process with DDP alone.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from simulated_group import Group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from telegrad import autograd, rpc
from telegrad.testing import processes

RANKS = 2
OPTIONS: dict[str, dict[str, bool]] = {
    "usual": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "unused views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}

Found: TypeAlias = list[Any]
"""For each parameter of the module, its gradient as a list, or None."""


class Net(nn.Module):
    """Two weights; not every call uses the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.second = nn.Parameter(torch.tensor([3.0, 4.0]))

    def forward(self, x: Tensor, uses_second: bool) -> Tensor:
        return x * self.first * self.second if uses_second else x * self.first


def same(x: Tensor) -> Tensor:
    return x * 1


def loss(rank: int, model: nn.Module, factor: float, uses_second: bool, over_workers: bool) -> Tensor:
    def other(x: Tensor) -> Tensor:
        found: Tensor = rpc.rpc_sync(f"w{1 - rank}", same, (x,)) if over_workers else same(x)
        return found

    return other(model(other(torch.tensor([factor, rank + factor])), uses_second)).sum()


def gradients(model: DistributedDataParallel, passes: Callable[[Callable[[Tensor], None], bool], None]) -> list[Found]:
    """Return the gradients of some passes, in a context and in `.grad`."""
    parameters = list(model.parameters())
    own = [torch.full_like(parameters[0], 7), None]
    for parameter, grad in zip(parameters, own, strict=True):
        parameter.grad = grad
    with autograd.context() as context:
        passes(lambda root: autograd.backward(context, [root]), True)
        found = autograd.get_gradients(context)
        in_context = [found[p].tolist() if p in found else None for p in parameters]
    untouched = [p.grad.tolist() if p.grad is not None else None for p in parameters]
    model.zero_grad()
    passes(torch.Tensor.backward, False)
    expected = [p.grad.tolist() if p.grad is not None else None for p in parameters]
    model.zero_grad()
    assert untouched == [[7.0, 7.0], None]
    return [in_context, expected]


def train(rank: int, _n: int, store: str) -> dict[str, list[Found]]:
    dist.init_process_group("gloo", init_method=f"{store}.gloo", rank=rank, world_size=RANKS)
    options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=RANKS, rpc_backend_options=options)
    found: dict[str, list[Found]] = {}
    for name, settings in OPTIONS.items():
        model = DistributedDataParallel(Net(), **settings)
        finds_unused = "find_unused_parameters" in settings

        def two(run: Callable[[Tensor], None], over_workers: bool, synchronized: bool = True) -> None:
            with nullcontext() if synchronized else model.no_sync():  # noqa: B023  # called in this iteration
                run(loss(rank, model, 1.0, True, over_workers))  # noqa: B023
            run(loss(rank, model, 10.0, not finds_unused or rank == 0, over_workers))  # noqa: B023

        def no_sync(run: Callable[[Tensor], None], over_workers: bool) -> None:
            two(run, over_workers, synchronized=False)

        found[f"{name}: two passes"] = gradients(model, two)
        if name != "static":
            found[f"{name}: no_sync"] = gradients(model, no_sync)
        if finds_unused:
            for step in range(3):

                def one(run: Callable[[Tensor], None], over_workers: bool, step: int = step) -> None:
                    run(loss(rank, model, step + 1.0, rank == 0, over_workers))  # noqa: B023

                found[f"{name}: one rank uses it, step {step}"] = gradients(model, one)

            def none(run: Callable[[Tensor], None], over_workers: bool) -> None:
                run(loss(rank, model, 1.0, False, over_workers))  # noqa: B023

            found[f"{name}: no rank uses it"] = gradients(model, none)
    rpc.shutdown()
    dist.destroy_process_group()
    return found


def test_gradients_are_those_of_local_training() -> None:
    first, second = processes(RANKS, train, method="forkserver")
    assert len(first) == 17
    for name, (in_context, expected) in first.items():
        assert in_context == expected, name
        assert second[name] == first[name], name


def test_a_hook_of_the_reducer_gets_the_sum_with_earlier_passes() -> None:
    """Check also that a gradient which the program has read stays as it is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        seen: list[list[float]] = []

        def record(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            seen.append(bucket.buffer().tolist())
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() * 3)
            return future

        model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        model.register_comm_hook(None, record)
        group = Group(2, 0)
        weight = model.module.weight
        kept: list[Tensor] = []
        for factor in (1.0, 10.0):
            (received,) = group.transfer(1, 0, [torch.full((1, 2), factor, requires_grad=True)])
            with model.no_sync() if factor == 1 else nullcontext():
                group.backward(0, [model(received).sum()])
            kept.append(group.contexts[0].gradients[weight])
        assert seen == [[11.0, 11.0]]
        assert [grad.tolist() for grad in kept] == [[[1.0, 1.0]], [[33.0, 33.0]]]
        assert weight.grad is None
    finally:
        dist.destroy_process_group()
