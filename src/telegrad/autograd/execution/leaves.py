"""Accumulation of leaf gradients: ownership of their memory, and order of sums.

A gradient in a context is uniquely owned and has its leaf's strides, like `.grad`. Whether the engine's tensor is kept
or copied follows torch's own rule (`AccumulateGrad`).

A leaf that several disjoint sources reach gets one partial gradient from each. They are added in the order of the
sources, each as soon as all earlier ones have arrived, regardless of the order of arrival. So two runs agree bit for
bit. If the partial gradients arrive in order, as from the micro-batches of a pipeline, only one sum is in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad.autograd.ddp import run_accumulate_grad
from telegrad.autograd.execution.torch_engine import run_engine

if TYPE_CHECKING:
    from weakref import ref

    from torch.autograd.graph import Node

    from telegrad.autograd.context import Context

__all__ = [
    "ELEMENT_REFCOUNT",
    "VARIABLE_REFCOUNT",
    "SharedLeaves",
    "accumulate",
    "add_outer",
    "add_to_context",
    "add_to_grad",
    "edges_of_outer",
    "sum_of",
]


class OuterReceipt(Protocol):
    """Record of a message received outside of contexts (`plain.records.Receipt`)."""

    outputs: int
    tensors: Sequence[ref[Tensor]]


_use_count = getattr(Tensor, "_use_count", None)


def _base_refcounts() -> tuple[int, int]:
    """Return `getrefcount` of an object in one variable, and of a tuple's element."""
    variable = object()
    for element in (object(),):
        return getrefcount(variable), getrefcount(element)
    raise AssertionError


VARIABLE_REFCOUNT, ELEMENT_REFCOUNT = _base_refcounts()


class _Sum:
    """Sum of partial gradients of one leaf."""

    __slots__ = ("leaf", "out_of_order", "sources_added", "total", "uniquely_owned")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        self.sources_added = 0  # number of the first sources that are in `total`
        self.total: Tensor | None = None
        self.uniquely_owned = False  # `total` is a sum, not a tensor of the engine
        self.out_of_order: dict[int, Tensor | None] = {}  # source -> its partial gradient, until earlier ones arrive

    def add(self, part: Tensor | None) -> None:
        if part is not None:
            if self.total is None:
                self.total = part
            else:
                self.total, self.uniquely_owned = _add(self.total, part, self.uniquely_owned), True


class SharedLeaves:
    """The gradients of leaves that several sources reach, in one pass.

    Args:
        context: Gets the sums.
        shared: The id of a leaf -> the sources (by bit, ascending) that reach it.
    """

    __slots__ = ("_context", "_shared", "_sums")

    def __init__(self, context: Context, shared: Mapping[int, Sequence[int]]) -> None:
        self._context = context
        self._shared = shared
        self._sums: dict[int, _Sum] = {}  # not complete yet

    @property
    def waiting(self) -> bool:
        """Whether some leaf has partial gradients of some sources, but not of all."""
        return bool(self._sums)

    def add(self, leaf: Tensor, source: int, grad: Tensor | None) -> None:
        """Add the partial gradient of a source; None is an undefined gradient."""
        sources = self._shared[id(leaf)]
        leaf_sum = self._sums.get(id(leaf))
        if leaf_sum is None:
            leaf_sum = self._sums[id(leaf)] = _Sum(leaf)
        leaf_sum.out_of_order[source] = grad
        while leaf_sum.sources_added < len(sources) and sources[leaf_sum.sources_added] in leaf_sum.out_of_order:
            leaf_sum.add(leaf_sum.out_of_order.pop(sources[leaf_sum.sources_added]))
            leaf_sum.sources_added += 1
        if leaf_sum.sources_added == len(sources):
            del self._sums[id(leaf)]
            self._accumulate(leaf_sum)

    def finish(self) -> None:
        """Add up the partial gradients that have arrived: no more will arrive."""
        sums, self._sums = self._sums, {}
        for leaf_sum in sums.values():
            for source in sorted(leaf_sum.out_of_order):
                leaf_sum.add(leaf_sum.out_of_order.pop(source))
            self._accumulate(leaf_sum)

    def _accumulate(self, leaf_sum: _Sum) -> None:
        total, leaf_sum.total = leaf_sum.total, None
        if total is not None:
            accumulate(self._context, leaf_sum.leaf, total, leaf_sum.uniquely_owned)


def accumulate(
    context: Context | None, leaf: Tensor, grad: Tensor, uniquely_owned: bool, run_hooks: bool = True
) -> None:
    """Add a leaf's complete gradient to a context, or to the leaf's `.grad`.

    Args:
        context: The context; None for `.grad`.
        leaf: The leaf.
        grad: Its gradient.
        uniquely_owned: Whether no other Python code refers to `grad`.
        run_hooks: Whether the leaf's post-accumulate hooks run with the gradient in a context. Not in a pass of
            `torch.autograd.grad`, which accumulates nothing.
    """
    if context is None:
        add_to_grad(leaf, grad)
        return
    if grad.layout is torch.strided is leaf.layout:
        fits = grad.stride() == leaf.stride()
    else:
        fits = grad.is_sparse  # other layouts have no strides to compare; torch copies them
    if not (fits and uniquely_owned and _use_count is not None and _use_count(grad) <= 1):
        grad = _copy(leaf, grad)
    if not run_hooks or not getattr(leaf, "_post_accumulate_grad_hooks", None):
        add_to_context(context, leaf, grad)
        return
    run_accumulate_grad(leaf, grad, context)


def add_to_context(context: Context, leaf: Tensor, grad: Tensor) -> None:
    """Add a uniquely owned gradient to a context."""
    gradients = context.gradients
    with context.lock:
        before = gradients.setdefault(leaf, grad)
        if before is not grad:
            gradients[leaf] = _add(before, grad, False)


def add_to_grad(leaf: Tensor, grad: Tensor) -> None:
    """Add a gradient to the `.grad` of a leaf of which the tensor hooks have run.

    Torch's own node does it: under its lock, with the hooks of `.grad` and, if the leaf has no tensor hooks, with those
    of the node itself.
    """
    if not getattr(leaf, "_backward_hooks", None):
        run_engine((leaf,), (grad,), (), False, True)
        return
    with torch.inference_mode(False):
        with torch.enable_grad():
            node = get_gradient_edge(leaf).node
        with torch.no_grad():
            node(grad)  # type: ignore[operator]  # typed as an abstract class


def edges_of_outer(node: Node) -> list[GradientEdge]:
    """Return the edges of the tensors of a message received outside of contexts."""
    receipt: OuterReceipt = node.receipt  # type: ignore[attr-defined]
    return [GradientEdge(node, output) for output in range(receipt.outputs)]


def add_outer(context: Context, node: Node, grads: Sequence[Tensor | None]) -> None:
    """Add gradients of tensors received outside of a context to it, as of leaves.

    A tensor that has been freed, or changed in place, cannot be asked for: its gradient is dropped.
    """
    receipt: OuterReceipt = node.receipt  # type: ignore[attr-defined]
    for tensor, grad in zip([reference() for reference in receipt.tensors], grads, strict=False):
        if grad is not None and tensor is not None and tensor.grad_fn is node:
            accumulate(context, tensor, grad, False)


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of two or more tensors, added in this order, as a new tensor."""
    total = _add(parts[0], parts[1], False)
    for part in parts[2:]:
        total = _add(total, part, True)
    return total


def _add(total: Tensor, part: Tensor, in_place: bool) -> Tensor:
    """Return total + part, dense before sparse: torch does not support sparse + dense."""
    if total.layout is not part.layout and total.is_sparse:
        return part + total
    if in_place and total.layout is torch.strided:
        return total.add_(part)
    return total + part


def _copy(leaf: Tensor, grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided or leaf.layout is not torch.strided:
        return grad.clone()
    return torch.empty_like(leaf, dtype=grad.dtype, requires_grad=False).copy_(grad)
