"""Deep graphs, which torch would free recursively, and overflow the stack.

From torch 2.13 on (2.12 was not tried) a node that Python has seen keeps its Python object, and a chain of such nodes
is freed recursively: one of 20,000 overflows a stack of 8 MiB when its last tensor dies. Our walks see every node. So
now and then, on its way through a large graph, a walk lets the node at hand hold, in its `metadata`, those that it
leads to. When it dies, so do they, but not further down the stack: the first such node on the way frees what all the
others have held, one after the other.

Whichever way one goes down the graph, one comes by such a node: they are drawn with pseudo-random gaps, of 64 nodes on
average, so that they have nothing to do with the shape of the graph. That a way of 2000 nodes has none has a
probability of 2e-14.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Descent"]

FIRST = 512  # nodes of a large graph; smaller ones need no care
_GAPS = random.Random(0).choices(range(1, 128), k=1021)


class _Freeing(threading.local):
    nodes: list[Any] | None = None  # to be let go of by who is at it in this thread


_freeing = _Freeing()


class _Held:
    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Any]) -> None:
        self.nodes = nodes

    def __del__(self) -> None:
        # Torch takes the node's own edges apart before its metadata, so what is let go of here dies here.
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


class Descent:
    """What a walk of a large graph takes care of, as a context around it.

    Attributes:
        at: `pass_by` is to be called with the node that is the walk's `at`-th.
    """

    __slots__ = ("_collecting", "_gaps", "at")

    def __init__(self) -> None:
        self.at: int = FIRST
        self._gaps: Iterator[int] | None = None
        self._collecting = False

    def __enter__(self) -> Descent:
        return self

    def pass_by(self, node: Any, nexts: Iterable[tuple[Any, int]]) -> None:
        """Lets the node hold those that it leads to, its `next_functions`."""
        if self._gaps is None:
            self._gaps = itertools.cycle(_GAPS)
            # A new object for each node, and none of them garbage: the cycle collector would go over the whole heap
            # again and again, which takes longer than the walk.
            self._collecting = gc.isenabled()
            gc.disable()
        self.at += next(self._gaps)
        node.metadata["telegrad"] = _Held([there for there, _ in nexts if there is not None])

    def __exit__(self, *_: object) -> None:
        if self._collecting:
            gc.enable()
