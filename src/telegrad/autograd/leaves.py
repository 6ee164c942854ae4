"""Gradients of leaves on their way into the context: whose memory they are, and in which order they are added up.

A gradient in a context belongs to nobody else and has its leaf's strides, as `.grad` does; the rule for when the tensor
that the engine made can be kept, and when it is copied, is torch's own (`AccumulateGrad`).

A leaf that several sources of a forest reach gets one part from each. They are added in the order of the sources,
whatever order they come in, each as soon as those before it have come: so two runs agree bit for bit, and where parts
come in order, as from the micro-batches of a pipeline, no more than one sum is held.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from telegrad.autograd.ddp import accumulate_beside

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from telegrad.autograd.context import Context

__all__ = ["ALONE", "ALONE_IN_TUPLE", "Leaves", "land", "references", "total_of"]

_use_count = getattr(Tensor, "_use_count", None)


def references(thing: object) -> int:
    """How many there are to a Python object, some of this call among them: compare with the two constants."""
    return sys.getrefcount(thing)


def _references_at_rest() -> tuple[int, int]:
    """What `references` gives for what one variable holds, and for what a tuple holds and a loop looks at."""
    alone = object()
    for inside in (object(),):
        return references(alone), references(inside)
    raise AssertionError


ALONE, ALONE_IN_TUPLE = _references_at_rest()


class _Sum:
    """Parts of one leaf's gradient."""

    __slots__ = ("added", "early", "own", "total")

    def __init__(self) -> None:
        self.added = 0  # sources that are in `total`, the first so many
        self.total: Tensor | None = None
        self.own = False  # `total` was made here
        self.early: dict[int, Tensor | None] = {}  # source -> its part, until those before it are there

    def take(self, part: Tensor | None) -> None:
        if part is not None:
            if self.total is None:
                self.total = part
            else:
                self.total, self.own = add(self.total, part, self.own), True


class Leaves:
    """The leaves' gradients of one pass.

    Args:
        context: what they go to.
        shared: leaf -> the sources (by bit, ascending) that reach it, if there are several.
    """

    def __init__(self, context: Context, shared: Mapping[Node, Sequence[int]]) -> None:
        self._context = context
        self._shared = shared
        self._sums: dict[Node, _Sum] = {}  # not complete yet

    @property
    def waiting(self) -> bool:
        """Some leaf has parts, and not all."""
        return bool(self._sums)

    def part(self, node: Node, source: int, grad: Tensor | None) -> None:
        """What a source has for a shared leaf; each source, once; None: nothing."""
        sources = self._shared[node]
        found = self._sums.get(node)
        if found is None:
            found = self._sums[node] = _Sum()
        found.early[source] = grad
        while found.added < len(sources) and sources[found.added] in found.early:
            found.take(found.early.pop(sources[found.added]))
            found.added += 1
        if found.added == len(sources):
            del self._sums[node]
            self._whole(node, found)

    def finish(self) -> None:
        """No more will come."""
        sums, self._sums = self._sums, {}
        for node, found in sums.items():
            for source in sorted(found.early):
                found.take(found.early.pop(source))
            self._whole(node, found)

    def _whole(self, node: Node, found: _Sum) -> None:
        total, found.total = found.total, None
        if total is not None:
            self.land(node.variable, total, found.own)  # type: ignore[attr-defined]

    def land(self, leaf: Tensor, grad: Tensor, alone: bool) -> None:
        """Adds a whole gradient to the context. `alone`: nobody else in Python has this tensor."""
        land(self._context, leaf, grad, alone)

    def add(self, leaf: Tensor, grad: Tensor) -> None:
        """Adds to the context what is its own."""
        enter(self._context, leaf, grad)


def land(context: Context, leaf: Tensor, grad: Tensor, alone: bool) -> None:
    """Adds a leaf's whole gradient to a context. `alone`: nobody else in Python has this tensor."""
    if not (alone and _use_count is not None and _use_count(grad) <= 1 and _lies_alike(leaf, grad)):
        grad = _copied(leaf, grad)
    if not getattr(leaf, "_post_accumulate_grad_hooks", None):
        enter(context, leaf, grad)
        return
    accumulate_beside(leaf, grad, context)


def enter(context: Context, leaf: Tensor, grad: Tensor) -> None:
    """Adds to a context what is its own."""
    gradients = context.gradients
    with context.lock:
        before = gradients.setdefault(leaf, grad)
        if before is not grad:
            gradients[leaf] = add(before, grad, False)


def total_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum of two or more, in this order; a tensor of its own."""
    total = add(parts[0], parts[1], False)
    for part in parts[2:]:
        total = add(total, part, True)
    return total


def add(total: Tensor, part: Tensor, own: bool) -> Tensor:
    """total + part, in place if `total` is ours and that can be. Dense comes first: torch refuses sparse + dense."""
    if total.layout is not part.layout and total.is_sparse:
        return part + total
    if own and total.layout is torch.strided:
        return total.add_(part)
    return total + part


def _lies_alike(leaf: Tensor, grad: Tensor) -> bool:
    if grad.layout is torch.strided is leaf.layout:
        return grad.stride() == leaf.stride()
    return grad.is_sparse  # other layouts have no strides to compare; torch copies them


def _copied(leaf: Tensor, grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided or leaf.layout is not torch.strided:
        return grad.clone()
    return torch.empty_like(leaf, dtype=grad.dtype, requires_grad=False).copy_(grad)
