"""What sources lead to, each to something of its own: one walk from each, in which nothing needs to be planned.

Where two of them meet the walk has been in vain, since another kind is to follow. That is not worth while again and
again where it is long.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from telegrad._core import Reach
from telegrad.autograd.graph import LEAF, by_id, goes_to_the_ends, kinds

if TYPE_CHECKING:
    from telegrad.autograd.context import Received, Sent
    from telegrad.autograd.deep import Descent

__all__ = ["Found", "Reaching", "Vain", "vain"]

_LARGE = 400  # nodes of a graph that is not to be walked in vain
_SKIPPED = 15  # passes after a large graph has been walked in vain, in which no graph is


class Found(NamedTuple):
    """What a source leads to."""

    leaves: list[Tensor]
    recvs: list[Received]
    to_the_ends: bool  # see graph.goes_to_the_ends


class Reaching:
    """What the sources lead to, each to something of its own.

    Args:
        receipts: what was received here.
        descent: in which they are walked from.
    """

    __slots__ = ("_descent", "_leaves", "_nodes", "_recvs")

    def __init__(self, receipts: Sequence[Received], descent: Descent) -> None:
        self._descent = descent
        self._nodes = Reach(kinds)
        self._leaves: dict[int, int] = {}  # a leaf's identity -> the source from which it was reached
        self._recvs: dict[Any, Received] = {}
        for received in receipts:
            self._recvs[received.node] = received

    @property
    def walked(self) -> int:
        """How many nodes."""
        return self._nodes.inner

    def of(self, source: int, starts: list[Any]) -> Found | None:
        """All leaves and recvs that these nodes, and leaves, lead to. None: another source leads to one of them, or
        one is a value that was received in another context."""
        nodes = self._nodes
        inner, plain = nodes.inner, nodes.plain
        ends = nodes.walk(starts, source, self._descent)
        if ends is None:
            return None
        leaves: list[Tensor] = []
        recvs: list[Received] = []
        for node, _ in ends:
            if kinds[type(node)] == LEAF:
                leaf = node.variable
                if id(leaf) in self._leaves:
                    return None
                self._leaves[id(leaf)] = source
                leaves.append(leaf)
            else:
                received = self._recvs.get(node)
                if received is None:
                    return None
                recvs.append(received)
        if len(recvs) > 1:
            recvs.sort(key=by_id)
        return Found(leaves, recvs, goes_to_the_ends(len(recvs), len(ends), nodes.inner - inner, nodes.plain - plain))

    def of_sent(self, sent: Sent) -> list[Tensor] | None:
        """The leaves that a message's gradients lead to; None also if they lead to recvs, or a leaf that was sent
        requires no gradient by now."""
        source, leaves, starts = sent.id, [], []
        for edge in sent.edges:
            if isinstance(edge, Tensor):
                if not edge.requires_grad:
                    return None
                before = self._leaves.get(id(edge))
                if before is None:
                    self._leaves[id(edge)] = source
                    leaves.append(edge)
                elif before != source:
                    return None
            elif edge is not None:
                starts.append(edge.node)
        if starts:
            found = self.of(source, starts)
            if found is None or found.recvs:
                return None
            leaves += found.leaves
        return leaves


class Vain:
    """How large graphs are spared a walk in vain: those of a thread are mostly alike.

    Attributes:
        passes: that the short way is still not tried for.
    """

    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes: int = 0

    def may_walk(self) -> bool:
        """Is the short way to be tried for in this pass?"""
        if self.passes <= 0:
            return True
        self.passes -= 1
        return False

    def note(self, nodes: int) -> None:
        """It was one past so many."""
        if nodes > _LARGE:
            self.passes = _SKIPPED


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.here: Vain = Vain()


vain: _OfThread = _OfThread()
