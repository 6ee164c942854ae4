"""Looking at what is recorded in a context."""

from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.recording import Recv, edges_of


def contexts(worker: Any) -> dict[int, Context]:
    return worker._worker.autograd.contexts.table  # type: ignore[no-any-return]


def of(worker: Any, context: Context) -> Context:
    """Another worker's part of it."""
    return contexts(worker)[context.id]


def leads_to(context: Context, message: int) -> list[Any]:
    """The leaves that the tensors of a message were, None for those that were results."""
    edges = edges_of(context.sends[message])
    return [getattr(edge.node, "variable", None) for edge in edges if edge is not None]


def is_received(tensor: Tensor) -> bool:
    return type(tensor.grad_fn) is Recv._backward_cls


def leaf(*shape: int) -> Tensor:
    return torch.rand(shape, requires_grad=True)
