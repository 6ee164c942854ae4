"""Parameters of DistributedDataParallel in graphs over several workers."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from telegrad import autograd, rpc
from telegrad.options import Options
from telegrad.testing import processes

TRAINERS = 2


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class AroundACall(nn.Module):
    """Parameters before and after a call.

    Their gradients belong to different stages, but the reducer needs all in one pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(2, 2, bias=False)
        self.after = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(rpc.rpc_sync("server", double, args=(self.before(x),)))


def train(rank: int, _n: int, store: str) -> list[list[float]]:
    options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    if rank == TRAINERS:
        rpc.init_rpc("server", rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options)
        rpc.shutdown()
        return []
    dist.init_process_group("gloo", init_method=f"{store}.gloo", rank=rank, world_size=TRAINERS)
    rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options)
    torch.manual_seed(0)
    model = DistributedDataParallel(AroundACall())
    model.module.before.weight.grad = torch.full((2, 2), 7.0)
    found = []
    for _ in range(2):
        with autograd.context() as context:
            loss = model(torch.full((1, 2), rank + 1.0)).sum()
            autograd.backward(context, [loss])
            grads = autograd.get_gradients(context)
            found.append([grads[p].abs().sum().item() for p in model.parameters()])
    assert model.module.before.weight.grad.eq(7).all()
    assert model.module.after.weight.grad is None
    torch.manual_seed(0)
    alone = AroundACall()
    rpc.shutdown()
    dist.destroy_process_group()
    y = alone.after(double(alone.before(torch.full((1, 2), 1.5))))  # linear: the mean of the trainers' inputs
    y.sum().backward()
    found.append([p.grad.abs().sum().item() for p in alone.parameters() if p.grad is not None])
    return found


def test_gradients_on_both_sides_of_a_call_are_reduced() -> None:
    *trainers, _ = processes(TRAINERS + 1, train, method="forkserver")
    for first, second, alone in trainers:
        torch.testing.assert_close(torch.tensor(first), torch.tensor(alone))
        assert first == second


# ---- without a context


class BeforeACall(nn.Module):
    """Two layers; their parameters, and all gradients, are small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 2)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.square(self.first(x)))
        return hidden


class TwoOutputs(nn.Module):
    """Its outputs, which are sent in two messages, share just a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, (x + 1) * self.weight


class Head:
    weight: torch.Tensor


def head(x: torch.Tensor) -> torch.Tensor:
    return x * Head.weight


def head_grad() -> Any:
    return None if Head.weight.grad is None else Head.weight.grad.tolist()


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.full((4, 2), rank + 1.0) * torch.arange(4)[:, None] + step


def grads_of(module: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in module.parameters()]


def train_without_context(rank: int, _n: int, store: str) -> dict[str, Any]:
    options = Options(init_method=store, plain_backward=True)
    Head.weight = torch.tensor([2.0, 3.0], requires_grad=True)
    if rank == TRAINERS:
        rpc.init_rpc("server", rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options)
        rpc.shutdown()
        return {}
    dist.init_process_group("gloo", init_method=f"{store}.gloo", rank=rank, world_size=TRAINERS)
    rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options)
    found: dict[str, Any] = {}

    def step(model: nn.Module, number: int) -> None:
        rpc.rpc_sync("server", head, (model(inputs(rank, number)),)).sum().backward()

    model = DistributedDataParallel(BeforeACall())
    step(model, 0)
    found["step"] = grads_of(model)
    step(model, 1)
    found["accumulated"] = grads_of(model)

    model = DistributedDataParallel(BeforeACall())
    with model.no_sync():
        step(model, 0)
    found["no_sync"] = grads_of(model)
    step(model, 1)
    found["after no_sync"] = grads_of(model)

    around = DistributedDataParallel(AroundACall())
    for parameter in around.parameters():
        nn.init.ones_(parameter)
    around(inputs(rank, 0)).sum().backward()
    found["around"] = grads_of(around)
    two = DistributedDataParallel(TwoOutputs())
    first, second = two(inputs(rank, 0))
    (rpc.rpc_sync("server", double, (first,)).sum() + rpc.rpc_sync("server", double, (second,)).sum()).backward()
    found["two"] = grads_of(two)
    model = DistributedDataParallel(BeforeACall())
    received = rpc.rpc_sync("server", head, (inputs(rank, 0),))  # a leaf for the context
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync("server", double, (model(received),)).sum()])
        gradients = autograd.get_gradients(context)
        found["in a context"] = [gradients[tensor].tolist() for tensor in (*model.parameters(), received)]
    dist.barrier()
    found["head"] = rpc.rpc_sync("server", head_grad)
    dist.barrier()
    rpc.shutdown()
    dist.destroy_process_group()
    return found


def alone(steps: list[int], ranks: Iterable[int], module: nn.Module) -> list[Any]:
    """Return the mean of the gradients of these ranks, computed in this process."""
    for number in steps:
        for rank in ranks:
            module(inputs(rank, number)).sum().backward()
    return [(p.grad / len([*ranks])).tolist() for p in module.parameters() if p.grad is not None]


class WithHead(BeforeACall):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return head(super().forward(x))


class LocalAroundACall(AroundACall):
    def forward(self, x: torch.Tensor) -> Any:
        return self.after(double(self.before(x)))


class AfterHead(BeforeACall):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return double(super().forward(head(x)))


class LocalTwoOutputs(TwoOutputs):
    def forward(self, x: torch.Tensor) -> Any:
        return double(torch.cat(super().forward(x)))


def test_plain_passes_reduce_gradients() -> None:
    *trainers, _ = processes(TRAINERS + 1, train_without_context, method="forkserver")
    Head.weight = torch.tensor([2.0, 3.0], requires_grad=True)
    step, accumulated = alone([0], range(TRAINERS), WithHead()), alone([0, 1], range(TRAINERS), WithHead())
    around = LocalAroundACall()
    for parameter in around.parameters():
        nn.init.ones_(parameter)
    expected = alone([0], range(TRAINERS), around)
    two, in_context = alone([0], range(TRAINERS), LocalTwoOutputs()), alone([0], range(TRAINERS), AfterHead())
    for rank, found in enumerate(trainers):
        assert found["step"] == step
        assert found["accumulated"] == accumulated
        assert found["no_sync"] == alone([0], [rank], WithHead())
        assert found["after no_sync"] == accumulated
        assert found["around"] == expected
        assert found["two"] == two
        received = head(inputs(rank, 0)).detach().requires_grad_()
        double(BeforeACall()(received)).sum().backward()
        assert received.grad is not None
        assert found["in a context"][-1] == received.grad.tolist()
        assert found["in a context"][:-1] == in_context
    assert found["no_sync"] != step
    Head.weight.grad = None
    for _ in range(2):  # each trainer has made both steps twice
        alone([0, 1], range(TRAINERS), WithHead())
    assert trainers[0]["head"] == head_grad()
