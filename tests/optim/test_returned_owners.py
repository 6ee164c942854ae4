"""Optimizers after a lost connection: the owner lives, its part is gone."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn, optim

from telegrad import rpc
from telegrad.errors import OwnerLost, WorkerLost
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from telegrad.rpc import Options, RRef
from telegrad.testing import Cluster, cluster, eventually, faults
from telegrad.testing.faults import Plan, Rule


@pytest.fixture
def w() -> Iterator[Cluster]:
    with cluster(3, Options(faults=str(Plan()), resume=False)) as group:
        yield group


def lose(owner: str, held: RRef[object]) -> None:
    """Break the connection to a worker, and connect again."""
    cut = Rule("cut", "w0", owner, "call")
    faults.add(cut)
    with pytest.raises(WorkerLost):
        rpc.rpc_sync(owner, abs, (-1,))
    faults.remove(cut)
    eventually(lambda: held.worker.references.unusable_reason(held.id, held.owner_id) is not None)
    assert rpc.rpc_sync(owner, abs, (-1,)) == 1


def give_gradients(module: RRef[nn.Module]) -> None:
    for parameter in module.local_value().parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.usefixtures("w")
def test_each_use_names_the_owner() -> None:
    modules = [RemoteModule(name, nn.Linear, (2, 2)) for name in ("w1", "w2")]
    optimizer = DistributedOptimizer(optim.SGD, [rref for each in modules for rref in each.remote_parameters()], lr=1.0)
    before = modules[1].state_dict()["weight"]
    for module in modules:
        rpc.rpc_sync(module.on, give_gradients, (module.module_rref,))
    state = optimizer.state_dict()
    lose("w1", optimizer.remote_optimizers[0])
    new = RemoteModule("w1", nn.Linear, (2, 2)).remote_parameters()
    uses: list[Callable[[], object]] = [
        optimizer.step,
        optimizer.zero_grad,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(state),
        lambda: clip_grad_norm_(optimizer, 1.0),
        lambda: optimizer.add_param_group({"params": new}),
    ]
    for use in uses:
        with pytest.raises(OwnerLost, match="was lost with its owner, worker w1") as caught:
            use()
        assert caught.value.name == "w1"
    assert torch.equal(modules[1].state_dict()["weight"], before - 1)  # the other owner has stepped
    assert len(optimizer.param_groups) == 1
