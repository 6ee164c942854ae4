"""Gradients of leaves on their way into the context: whose memory they are, and in which order they are added up.

A gradient in a context belongs to nobody else and has its leaf's strides, as `.grad` does; the rule for when the tensor
that the engine made can be kept, and when it is copied, is torch's own (`AccumulateGrad`).

A leaf that several sources of a forest reach gets one part from each. They are added in the order of the sources,
whatever order they come in, each as soon as those before it have come: so two runs agree bit for bit, and where parts
come in order, as from the micro-batches of a pipeline, no more than one sum is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from telegrad.autograd.ddp import run_accumulate_grad

if TYPE_CHECKING:
    from telegrad.autograd.context import Context

__all__ = ["ALONE", "ALONE_IN_TUPLE", "Leaves", "accumulate", "add_to_context", "total_of"]

_use_count = getattr(Tensor, "_use_count", None)


def _references_at_rest() -> tuple[int, int]:
    """Return `getrefcount` of what one variable holds, and of what a tuple holds and a loop looks at."""
    alone = object()
    for inside in (object(),):
        return getrefcount(alone), getrefcount(inside)
    raise AssertionError


ALONE, ALONE_IN_TUPLE = _references_at_rest()


class _Sum:
    """Parts of one leaf's gradient."""

    __slots__ = ("added", "early", "leaf", "own", "total")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
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
        """Whether some leaf has parts, and not all."""
        return bool(self._sums)

    def part(self, leaf: Tensor, source: int, grad: Tensor | None) -> None:
        """Take the part of one source for a leaf; each source, once; None: nothing."""
        sources = self._shared[id(leaf)]
        found = self._sums.get(id(leaf))
        if found is None:
            found = self._sums[id(leaf)] = _Sum(leaf)
        found.early[source] = grad
        while found.added < len(sources) and sources[found.added] in found.early:
            found.take(found.early.pop(sources[found.added]))
            found.added += 1
        if found.added == len(sources):
            del self._sums[id(leaf)]
            self._whole(found)

    def finish(self) -> None:
        """Add up what has come: no more will."""
        sums, self._sums = self._sums, {}
        for found in sums.values():
            for source in sorted(found.early):
                found.take(found.early.pop(source))
            self._whole(found)

    def _whole(self, found: _Sum) -> None:
        total, found.total = found.total, None
        if total is not None:
            accumulate(self._context, found.leaf, total, found.own)


def accumulate(context: Context, leaf: Tensor, grad: Tensor, alone: bool) -> None:
    """Adds a leaf's whole gradient to a context. `alone`: nobody else in Python has this tensor."""
    if not (alone and _use_count is not None and _use_count(grad) <= 1 and _lies_alike(leaf, grad)):
        grad = _copied(leaf, grad)
    if not getattr(leaf, "_post_accumulate_grad_hooks", None):
        add_to_context(context, leaf, grad)
        return
    run_accumulate_grad(leaf, grad, context)


def add_to_context(context: Context, leaf: Tensor, grad: Tensor) -> None:
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
