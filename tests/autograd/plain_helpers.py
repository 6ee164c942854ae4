"""Tensors and functions of the tests of plain passes."""

from typing import Any

import torch
from torch import Tensor

from telegrad.testing import Gate


class State:
    """Tensors of the workers, which share this process."""

    weight: Tensor
    hidden: Tensor | None = None
    gate: Gate


def new_weight() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def ones() -> Tensor:
    return torch.ones(3, requires_grad=True)


def scale(x: Tensor) -> Tensor:
    return State.weight * x


def grad_of(tensor: Tensor) -> Any:
    return None if tensor.grad is None else tensor.grad.tolist()
