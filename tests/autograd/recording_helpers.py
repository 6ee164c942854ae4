"""Helpers to inspect the recordings of a context."""

from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.recording import Recv, edges_of


def contexts(worker: Any) -> dict[int, Context]:
    return worker._worker.autograd.contexts.table  # type: ignore[no-any-return]


def context_at(worker: Any, context: Context) -> Context:
    """Return the context at another worker."""
    return contexts(worker)[context.id]


def leads_to(context: Context, message: int) -> list[Any]:
    """Return the leaves in a message; None for a tensor that is a result."""
    edges = edges_of(context.sends[message])
    return [getattr(edge.node, "variable", None) for edge in edges if edge is not None]


def is_received(tensor: Tensor) -> bool:
    return type(tensor.grad_fn) is Recv._backward_cls


def leaf(*shape: int) -> Tensor:
    return torch.rand(shape, requires_grad=True)
