"""ZeroRedundancyOptimizer of a process group alongside a distributed optimizer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_helpers import batch, layer
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, ZeroRedundancyOptimizer
from telegrad.testing import processes

STEPS = 3


def train(rank: int, n: int, init_method: str) -> Any:
    """Train replicated layers, and an own layer on the other worker."""
    dist.init_process_group("gloo", init_method=init_method + "-gloo", rank=rank, world_size=n)
    options = rpc.Options(init_method=init_method)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    remote = RemoteModule(f"w{1 - rank}", layer, (rank,))
    dense = DistributedDataParallel(layer(7))
    sharded = ZeroRedundancyOptimizer(dense.parameters(), optim.Adam, lr=0.1)
    distributed = DistributedOptimizer(optim.Adam, remote.remote_parameters(), lr=0.1)
    for number in range(STEPS):
        with autograd.context() as context_id:
            autograd.backward(context_id, [(dense(remote(batch(number))) ** 2).sum()])
            for parameter, gradient in autograd.get_gradients(context_id).items():
                parameter.grad = gradient
            sharded.step()
            distributed.step(context_id)
    values = [p.tolist() for p in dense.parameters()], [v.tolist() for v in remote.state_dict().values()]
    del remote, distributed
    rpc.shutdown()
    dist.destroy_process_group()
    return values


@pytest.mark.timeout(120)
def test_both_optimizers_in_two_trainers() -> None:
    found = processes(2, train, method="forkserver")
    dense = layer(7)
    remotes = layer(0), layer(1)
    optimizers = [optim.Adam(module.parameters(), lr=0.1) for module in (dense, *remotes)]
    for number in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for remote in remotes:
            (dense(remote(batch(number))) ** 2).sum().backward()
        for parameter in dense.parameters():  # DDP averages
            assert parameter.grad is not None
            parameter.grad /= 2
        for optimizer in optimizers:
            optimizer.step()
    for (shared, own), remote in zip(found, remotes, strict=True):
        assert_close(shared, dense)
        assert_close(own, remote)


def assert_close(values: list[Any], module: nn.Module) -> None:
    for value, parameter in zip(values, module.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(value), parameter.detach())
