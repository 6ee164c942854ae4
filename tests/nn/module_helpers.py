"""Modules that the tests create on other workers."""

from typing import Any

import torch
from torch import Tensor, nn

from telegrad.nn import RemoteModule
from telegrad.rpc import RRef


class Net(nn.Module):
    """Two layers, an attribute, and methods besides `forward`."""

    def __init__(self, inputs: int, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs)
        self.inputs = inputs
        self.ran: list[str] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.norm(self.first(x)) * scale
        return y

    def encode(self, x: Tensor, *, bias: float = 0.0) -> Tensor:
        return x.sum(1) + bias

    def fail(self) -> None:
        raise KeyError("no such thing")

    @property
    def broken(self) -> int:
        raise AttributeError("it is the property's own")

    def log(self) -> list[str]:
        return self.ran


class NoModule:
    def __init__(self, *_: Any) -> None:
        pass


def failing() -> nn.Module:
    raise ValueError("cannot be made")


def noting(module: nn.Module) -> None:
    """For `apply`."""
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 2.0)


def use(module: RemoteModule, x: Tensor) -> tuple[Tensor, Tensor, str | int]:
    """Use a module that was sent, on its receiver."""
    return module(x), module.encode(x, bias=1.0), module.on


def is_reset_and_frozen(parameter: RRef[nn.Parameter]) -> bool:
    value = parameter.local_value()
    return value.grad is None and not value.requires_grad


def pass_back(module: RemoteModule) -> RemoteModule:
    return module


def attributes(module: RemoteModule) -> dict[str, Any]:
    return module.__dict__
