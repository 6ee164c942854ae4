"""Deep graphs, which torch would free recursively until the stack overflows.

From torch 2.13 on (2.12 was not tried) a node that Python has seen keeps its Python object, and a chain of such nodes
is freed recursively: a chain of 20,000 overflows a stack of 8 MiB when its last tensor dies. A walk makes a Python
object of every node. Therefore some nodes of a large graph get, in their `metadata`, an object that holds the nodes
below. When such a node dies, the nodes below it die as well, but not further down the stack: the first such object on
the way frees what all the others have held, one after the other.

Every way down the graph has such nodes: they are drawn with pseudo-random gaps, of 64 nodes on average, which have
nothing to do with the shape of the graph. That a way of 2000 nodes has none has a probability of 2e-14.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Iterable
from typing import Any

__all__ = ["FIRST", "RecursionGuard"]

FIRST = 512  # nodes of a large graph; smaller ones need no guard
_GAPS = random.Random(0).choices(range(1, 128), k=1021)


class _Freeing(threading.local):
    nodes: list[Any] | None = None  # to be freed by the first object on the stack of this thread


_freeing = _Freeing()


class _EdgeHolder:
    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Any]) -> None:
        self.nodes = nodes

    def __del__(self) -> None:
        # Torch takes the node's own edges apart before its metadata, so the nodes die here.
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


class RecursionGuard:
    """Makes a large graph fit to be freed, while it is walked. The walk creates it at its `first`-th node.

    `checkpoint` creates an object for some nodes, and none of these objects is garbage. The cycle collector would scan
    the whole heap again and again, which takes longer than the walk, so it is off until `close`.
    """

    first: int = FIRST

    def __init__(self) -> None:
        self._at = FIRST
        self._gaps = itertools.cycle(_GAPS)
        self._collecting = gc.isenabled()
        gc.disable()

    def checkpoint(self, node: Any, nexts: Iterable[tuple[Any, int]]) -> int:
        """Have a node hold the nodes below it.

        Args:
            node: The node.
            nexts: Its `next_functions`.

        Returns:
            The count of nodes at which the walk is to call this again.
        """
        node.metadata["telegrad"] = _EdgeHolder([there for there, _ in nexts if there is not None])
        self._at += next(self._gaps)
        return self._at

    def close(self) -> None:
        """End the walk."""
        if self._collecting:
            gc.enable()
