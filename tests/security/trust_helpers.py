"""Functions and classes that tests of trust expose, and a use of every part."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import telegrad.autograd
from telegrad import rpc
from telegrad.autograd import context
from telegrad.errors import NotExposed
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer

ran: list[str] = []
"""Functions of tests that have run without being exposed."""

EXPOSED = ("double", "count", "later", "Net", "Net.*", "mean_error")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.hook = print

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y

    def scores(self, n: int) -> Iterator[int]:
        yield from range(n)

    def _private(self) -> None:
        raise AssertionError

    @property
    def size(self) -> int:
        return 2


def double(x: Any) -> Any:
    return 2 * x


def count(n: int) -> Iterator[int]:
    yield from range(n)


@rpc.functions.async_execution
def later(x: int) -> "torch.futures.Future[int]":
    done: torch.futures.Future[int] = torch.futures.Future()
    done.set_result(x)
    return done


def mean_error(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(y, target)


def write(path: str) -> None:
    Path(path).touch()


class Canary:
    """Object whose pickle writes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return write, (self.path,)


def call_in_every_form() -> None:
    assert rpc.rpc_sync("w1", double, (2,)) == 4
    assert rpc.rpc_async("w1", double, (3,)).wait() == 6
    assert rpc.remote("w1", double, (4,)).to_here() == 8
    assert rpc.rpc_sync("w1", later, (5,)) == 5
    assert list(rpc.stream("w1", count, (3,))) == [0, 1, 2]
    assert list(rpc.map("w1", double, range(5))) == [0, 2, 4, 6, 8]
    assert rpc.rpc_sync("w1", double, (6,), retry=rpc.Retry()) == 12
    assert [each.wait() for each in rpc.multicast(["w0", "w1"], double, (7,))] == [14, 14]


def use_library(group: Any) -> None:
    """Use every part of the library that runs functions of its own on other workers."""
    x, target = torch.ones(4, 2), torch.zeros(4, 1)
    remote = RemoteModule("w1/cpu", Net)
    assert remote(x).shape == (4, 1)
    assert list(remote.module_rref.stream().scores(2)) == [0, 1]
    remote.train()
    remote.to("cpu")
    assert set(remote.state_dict()) == {"layer.weight"}
    remote.load_state_dict(remote.state_dict())
    optimizer = DistributedOptimizer(torch.optim.SGD, remote.remote_parameters(), lr=0.1, momentum=0.9)
    with context() as context_id:
        telegrad.autograd.backward(context_id, [remote(x).sum()])
        optimizer.step(context_id)
    optimizer.load_state_dict(optimizer.state_dict())
    pipe = Pipeline([remote], loss_fn=mean_error, micro_batches=2)
    assert pipe.step(x, target=target).dim() == 0
    pipe.zero_grad()
    assert group.on_each(rpc.all_gather) == [{"w0": 0, "w1": 1}] * 2
    group.on_each(lambda _: rpc.barrier())
    with group[1]:
        rpc.register_service("value", 3)
    assert rpc.get_service("value").to_here() == 3


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(NotExposed) as caught:
        call()
    return str(caught.value)
