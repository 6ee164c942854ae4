"""Deep graphs, which torch would free recursively, and overflow the stack.

From torch 2.13 on (2.12 was not tried) a node that Python has seen keeps its Python object, and a chain of such nodes
is freed recursively: one of 20,000 overflows a stack of 8 MiB when its last tensor dies. Our walk sees every node. So
in a graph of more than `DEEP` nodes each node through which one enters another `DEEP` levels holds, in its `metadata`,
what those levels lead on to. When it dies, that goes to the graveyard instead of the stack, and is let go of a little
later, a level at a time.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telegrad.autograd.graph import Walk

__all__ = ["DEEP", "drain_graveyard", "hold_deep"]

DEEP = 2000  # nodes that may be freed recursively

_graveyard: deque[Any] = deque()


class _Held:
    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Any]) -> None:
        self.nodes = nodes

    def __del__(self) -> None:
        _graveyard.append(self.nodes)


def drain_graveyard() -> None:
    """Lets go of what deep graphs have left behind. Call it when a pass or a context has ended, on no lock."""
    while _graveyard:
        try:
            _graveyard.popleft()
        except IndexError:  # another thread was faster
            return


def hold_deep(walk: Walk) -> None:
    """Prepares a graph for its end."""
    order, below, nodes = walk.order, walk.below, walk.nodes
    depth = [0] * len(nodes)
    for here in order:
        next_depth = depth[here] + 1
        for there in below(here):
            if there >= 0 and depth[there] < next_depth:
                depth[there] = next_depth
    onward: dict[int, dict[int, None]] = {}  # level -> nodes of later levels to which its edges lead
    for here in order:
        level = depth[here] // DEEP
        for there in below(here):
            if there >= 0 and depth[there] // DEEP > level and walk.kinds[there] == 0:
                onward.setdefault(level, {})[there] = None
    held = {level: [nodes[there] for there in found] for level, found in onward.items()}
    entries = {there for found in onward.values() for there in found}
    for here in (*(n for n in order if not depth[n]), *entries):
        found = held.get(depth[here] // DEEP)
        if found is not None:
            nodes[here].metadata["telegrad"] = _Held(found)
