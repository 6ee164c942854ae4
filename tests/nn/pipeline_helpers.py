"""Stages of pipelines, and the same model in one process."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from telegrad import rpc
from telegrad.nn import Pipeline
from telegrad.nn.pipeline.micro_batches import divide
from telegrad.rpc import RRef

FEATURES, CLASSES = 6, 3


def layer(number: int, inputs: int = FEATURES, outputs: int = FEATURES) -> nn.Module:
    """Return a stage with reproducible parameters."""
    generator = torch.Generator().manual_seed(number)  # not the global one: workers of a process share it
    module = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Linear(outputs, outputs))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module


def stages(places: Sequence[str]) -> list[Any]:
    return [(place, layer, (number,)) for number, place in enumerate(places)]


def one_process(count: int) -> nn.Sequential:
    return nn.Sequential(*(layer(number) for number in range(count)))


def batch(size: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(size, FEATURES, generator=generator), torch.randn(size, FEATURES, generator=generator)


def step_here(
    model: nn.Module,
    x: Tensor,
    target: Tensor,
    micro_batches: int = 1,
    loss_fn: Callable[[Any, Any], Tensor] = F.mse_loss,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Run the passes of a batch in this process, one micro-batch after the other."""
    sizes = divide(len(x), micro_batches)
    losses = []
    for part, expected in zip(torch.split(x, list(sizes)), torch.split(target, list(sizes)), strict=True):
        loss = loss_fn(model(part), expected) * (len(part) / len(x))
        (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def gradients_of(module: RRef[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.local_value().parameters()]


def gradients(pipe: Pipeline) -> list[Tensor | None]:
    """Return copies of the gradients of all parameters, in the order of the stages."""
    return [
        gradient for stage in pipe.stages for gradient in rpc.rpc_sync(stage.on, gradients_of, (stage.module_rref,))
    ]


def gradients_here(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Return whether gradients are equal bit by bit."""
    return len(found) == len(expected) and all(
        one is None if other is None else one is not None and torch.equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )


class Pair(nn.Module):
    """Stage with two arguments and three results, one of them an index."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = layer(number)

    def forward(self, x: Tensor, index: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, float]:
        return self.layer(x) * scale + x, index + 1, scale * 2


class Pick(nn.Module):
    """Last stage behind a `Pair`: uses the index, ignores the scale."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.eye(FEATURES)[:4] * number, freeze=False)
        self.layer = layer(number)

    def forward(self, x: Tensor, index: Tensor, scale: float) -> Tensor:
        y: Tensor = self.layer(x) + self.table(index % 4)
        return y


class Chain(nn.Module):
    """Stages in one process, of which each gets the results of the one before."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, *values: Any) -> Any:
        for module in self.parts:
            result = module(*values)
            values = result if isinstance(result, tuple) else (result,)
        return result


class Gate:
    """Point at which a pass of a test waits until the test continues."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.opened.wait(30)


gates: dict[str, Gate] = {}
"""Gates of the running test, by name."""


class Gated(nn.Module):
    """Stage that waits in its forward pass, if the test has a gate for it."""

    def __init__(self, name: str, number: int = 0) -> None:
        super().__init__()
        self.name = name
        self.layer = layer(number)

    def forward(self, x: Tensor) -> Tensor:
        gate = gates.get(self.name)
        if gate is not None:
            gate.wait()
        y: Tensor = self.layer(x)
        return y


class Failing(nn.Module):
    """Stage that fails at a sample with a mark, in its forward or its backward pass."""

    MARK = 1e6

    def __init__(self, where: str, number: int = 0) -> None:
        super().__init__()
        self.where = where
        self.layer = layer(number)

    def forward(self, x: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        if (marks == self.MARK).any():
            if self.where == "forward":
                raise KeyError("in the forward pass")
            if self.where == "backward":
                y = self.layer(x)
                y.register_hook(self.fail)
                return y, marks
        return self.layer(x), marks

    @staticmethod
    def fail(_: Tensor) -> None:
        raise KeyError("in the backward pass")


def loss_of_first(result: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    if (result[1] == -Failing.MARK).any():
        raise KeyError("in the loss")
    return F.mse_loss(result[0], target)
