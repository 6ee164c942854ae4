"""Parameters of DistributedDataParallel in graphs over several workers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from telegrad import autograd, rpc
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
    *trainers, _ = processes(TRAINERS + 1, train)
    for first, second, alone in trainers:
        torch.testing.assert_close(torch.tensor(first), torch.tensor(alone))
        assert first == second
