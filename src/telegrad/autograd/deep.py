"""Deep graphs, which torch would free recursively, and overflow the stack.

From torch 2.13 on (2.12 was not tried) a node that Python has seen keeps its Python object, and a chain of such nodes
is freed recursively: one of 20,000 overflows a stack of 8 MiB when its last tensor dies. Our walk sees every node. So
in a graph of more than `DEEP` nodes each node through which one enters another `DEEP` levels holds, in its `metadata`,
what those levels lead on to. When it dies, that goes to the graveyard instead of the stack, and is let go of a little
later, a level at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

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


def hold_deep(order: Sequence[Any], after: Mapping[Any, Any]) -> None:
    """Prepares a graph for its end.

    Args:
        order: its inner nodes, each before those that it leads to.
        after: the edges of every node; none for leaves and recvs.
    """
    depth: dict[Any, int] = {}
    get = depth.get
    for node in order:
        below = get(node, 0) + 1
        for target, _ in after[node]:
            if target is not None and get(target, 0) < below:
                depth[target] = below
    onward: dict[int, dict[Any, None]] = {}  # level -> nodes of later levels to which its edges lead
    for node in order:
        level = get(node, 0) // DEEP
        for target, _ in after[node]:
            if target is not None and depth[target] // DEEP > level and after[target]:
                onward.setdefault(level, {})[target] = None
    held = {level: list(nodes) for level, nodes in onward.items()}
    entries = {target for nodes in onward.values() for target in nodes}
    for node in (*(n for n in order if n not in depth), *entries):
        nodes = held.get(get(node, 0) // DEEP)
        if nodes is not None:
            node.metadata["telegrad"] = _Held(nodes)
