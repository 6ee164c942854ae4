"""Guard against stack overflow when torch frees a deep graph.

From torch 2.13 on (2.12 was not tested) a node with a Python object keeps it, and a chain of such nodes is freed
recursively: a chain of 20,000 overflows a stack of 8 MiB when its last tensor is freed. A walk creates a Python object
for every node. Therefore some nodes of a large graph get, in their `metadata`, an object that holds the next nodes.
When such a node is freed, the next nodes are freed too, but not deeper in the stack: the first such object in the stack
frees the nodes of all others, one after the other.

Every path has such nodes: they are chosen with pseudo-random gaps of 64 nodes on average, independent of the shape of
the graph. A path of 2000 nodes has none with a probability of 2e-14.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Iterable
from typing import Final

from torch.autograd.graph import Node

__all__ = ["FIRST", "GAPS", "RecursionGuard", "hold_next"]

FIRST = 512  # nodes of a large graph; smaller ones need no guard
GAPS: Final = random.Random(0).choices(range(1, 128), k=1021)
"""Numbers of nodes between those that hold the next ones."""


class _Freeing(threading.local):
    nodes: list[Node] | None = None  # to be freed by the first object on the stack of this thread


_freeing = _Freeing()


class _EdgeHolder:
    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def __del__(self) -> None:
        # Torch destroys the node's edges before its metadata, so this is the last reference to the nodes.
        others = _freeing.nodes
        if others is not None:
            others += self.nodes
            return
        others = _freeing.nodes = self.nodes
        try:
            while others:
                others.pop()
        finally:
            _freeing.nodes = None


def hold_next(node: Node, nexts: Iterable[tuple[Node | None, int]]) -> None:
    """Make a node hold its next nodes.

    Args:
        node: The node.
        nexts: Its `next_functions`.
    """
    holder = _EdgeHolder([below for below, _ in nexts if below is not None])
    node.metadata["telegrad"] = holder  # type: ignore[index]  # torch declares a method


class RecursionGuard:
    """Prepares a large graph for being freed, while it is walked.

    The walk creates it at its `first`-th node.

    `checkpoint` creates an object for some nodes, and none of these objects is garbage. The cycle collector would scan
    the whole heap again and again, which takes longer than the walk, so it is off until `close`.
    """

    first: int = FIRST

    def __init__(self) -> None:
        self._at = FIRST
        self._gaps = itertools.cycle(GAPS)
        self.resume()

    def resume(self) -> None:
        """Continue the walk, after its end."""
        self._collecting = gc.isenabled()
        gc.disable()

    def checkpoint(self, node: Node, nexts: Iterable[tuple[Node | None, int]]) -> int:
        """Make a node hold its next nodes.

        Args:
            node: The node.
            nexts: Its `next_functions`.

        Returns:
            The count of nodes at which the walk calls this again.
        """
        hold_next(node, nexts)
        self._at += next(self._gaps)
        return self._at

    def close(self) -> None:
        """End the walk."""
        if self._collecting:
            gc.enable()
