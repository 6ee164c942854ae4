"""Gradients that `torch.autograd.grad` returns, from a pass over several workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad.autograd.context import Context

if TYPE_CHECKING:
    from telegrad.autograd.context import Entry
    from telegrad.autograd.graph.local_graph import LocalGraph, Stage

__all__ = ["Wanted", "entry_of"]


def entry_of(tensor: Entry) -> Entry:
    """Return the gradient edge of a tensor, for a leaf the leaf itself."""
    if isinstance(tensor, Tensor):
        return tensor if tensor.grad_fn is None else GradientEdge(tensor.grad_fn, tensor.output_nr)
    leaf = getattr(tensor.node, "variable", None)
    return leaf if isinstance(leaf, Tensor) else tensor


class Wanted:
    """Inputs of `torch.autograd.grad`, and their gradients.

    Args:
        inputs: Tensors or edges of the root's graph.

    Attributes:
        leaves: Has the gradients of leaves.
    """

    def __init__(self, inputs: Sequence[Entry]) -> None:
        self.leaves: Context = Context(0)
        self._entries: list[Entry] = [entry_of(tensor) for tensor in inputs]
        self._gradients: dict[int, Tensor] = {}  # by position; of those that are not leaves

    def edges_in(self, graph: LocalGraph, stage: Stage) -> dict[int, GradientEdge]:
        """Return the edges, by position, of nodes that run in a stage."""
        segments: Sequence[object] = stage.segments or (None,)
        return {
            number: entry
            for number, entry in enumerate(self._entries)
            if not isinstance(entry, Tensor) and (graph.is_disjoint or graph.segment_of.get(entry.node) in segments)
        }

    def add(self, number: int, gradient: Tensor | None) -> None:
        """Add a gradient of the edge at a position."""
        if gradient is not None:
            before = self._gradients.get(number)
            self._gradients[number] = gradient if before is None else before + gradient

    @property
    def has_only_leaves(self) -> bool:
        """Whether all inputs are leaves."""
        return all(isinstance(entry, Tensor) for entry in self._entries)

    def results(self) -> list[Tensor | None]:
        """Return the gradients of the inputs, in order; None for unused inputs."""
        leaves = self.leaves.gradients
        return [
            leaves.get(entry) if isinstance(entry, Tensor) else self._gradients.get(number)
            for number, entry in enumerate(self._entries)
        ]
