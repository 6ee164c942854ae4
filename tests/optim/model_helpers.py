"""A model over two workers, and the same model in one process."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from telegrad import autograd
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, load_checkpoint
from telegrad.rpc import RRef

Step = Callable[[Any, int | None], None]


def layer(number: int) -> nn.Module:
    """Return a layer with reproducible values."""
    generator = torch.Generator().manual_seed(number)
    linear = nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return linear


def batch(number: int) -> Tensor:
    """Return the input of a step."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 + number))


class Spread:
    """Layers on workers."""

    def __init__(self, places: Sequence[str] = ("w1", "w2")) -> None:
        self.layers: list[RemoteModule] = [RemoteModule(place, layer, (n,)) for n, place in enumerate(places)]

    def parameters(self) -> list[RRef[nn.Parameter]]:
        return [one for module in self.layers for one in module.remote_parameters()]

    def groups(self) -> list[dict[str, Any]]:
        """Return the weights as a group with its own rate, and the biases as another."""
        mine = self.parameters()
        return [{"params": mine[::2], "lr": 0.05}, {"params": mine[1::2]}]

    def loss(self, x: Tensor) -> Tensor:
        for module in self.layers:
            x = torch.tanh(module(x))
        return (x * x).sum()

    def train(self, optimizer: DistributedOptimizer, number: int, before: Step | None = None) -> float:
        """Make one step in a context."""
        with autograd.context() as context_id:
            loss = self.loss(batch(number))
            autograd.backward(context_id, [loss])
            if before is not None:
                before(optimizer, context_id)
            optimizer.step(context_id)
        return loss.item()

    def values(self) -> list[Tensor]:
        return [value for module in self.layers for value in module.state_dict().values()]


class Local:
    """Layers of this process, with the values of `Spread`."""

    def __init__(self, count: int = 2) -> None:
        self.layers: list[nn.Module] = [layer(n) for n in range(count)]

    def parameters(self) -> list[nn.Parameter]:
        return [one for module in self.layers for one in module.parameters()]

    def groups(self) -> list[dict[str, Any]]:
        mine = self.parameters()
        return [{"params": mine[::2], "lr": 0.05}, {"params": mine[1::2]}]

    def loss(self, x: Tensor) -> Tensor:
        for module in self.layers:
            x = torch.tanh(module(x))
        return (x * x).sum()

    def train(self, optimizer: optim.Optimizer, number: int, before: Step | None = None) -> float:
        optimizer.zero_grad()
        loss = self.loss(batch(number))
        loss.backward()  # type: ignore[no-untyped-call]
        if before is not None:
            before(optimizer, None)
        optimizer.step()
        return loss.item()

    def values(self) -> list[Tensor]:
        return [value for module in self.layers for value in module.state_dict().values()]


class Run:
    """Model, optimizer and scheduler, with an entry for the number of steps."""

    def __init__(self, places: tuple[str, ...], cls: Any = optim.Adam, **kwargs: Any) -> None:
        self.model = Spread(places)
        self.optimizer = DistributedOptimizer(cls, self.model.groups(), **{"lr": 0.1, **kwargs})
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.count = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(self.model.train(self.optimizer, self.count))
            self.scheduler.step()
            self.count += 1
        return losses

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": nn.ModuleList(self.model.layers),
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "count": self.count,
        }

    def save(self, path: Path) -> None:
        dcp.save(self.state, checkpoint_id=path)

    def load(self, path: Path) -> None:
        state = self.state
        load_checkpoint(state, checkpoint_id=path)
        self.count = state["count"]


def assert_equal(spread: Spread, local: Local) -> None:
    """Check that two models have the same parameters, bit for bit."""
    for mine, expected in zip(spread.values(), local.values(), strict=True):
        assert torch.equal(mine, expected)


def set_grads(module: RRef[nn.Module], number: float) -> None:
    """Give a module's parameters gradients."""
    for place, parameter in enumerate(module.local_value().parameters()):
        parameter.grad = torch.full_like(parameter, number + place)


def grads_of(module: RRef[nn.Module]) -> list[Tensor | None]:
    """Return the `.grad` of a module's parameters."""
    return [parameter.grad for parameter in module.local_value().parameters()]
