"""One worker's local graph, walked once for a pass: its leaves and recvs, which sources reach what, and the stages.

A source is a send recorded here, or the root (`ROOT`, the call of `backward`); each has the edges where its gradients
enter. The walk goes from all sources down to leaves and recvs, iteratively, in time linear in nodes and edges.

With one source everything is one stage, and there is nothing to plan. Otherwise every node has a *mask*, the set of
sources that reach it, and the recvs with equal masks are a group (see protocols/backward.py). Recvs that all sources
reach belong to the final stage. A group's stage runs its recvs' ancestors, as far as no other stage has run them.
Nodes that are always run by the same stage are a *cell*: those whose smallest groups (by mask; a larger one cannot be
complete earlier) are the same. A cell with one smallest group is run by that group, whatever arrives when, so sums are
made in the same order in every run; one with several, which do not contain each other, is run by the first of them.

An edge that leaves a stage for a node that runs later is a *crossing*, unless it leads to a leaf that can be captured
as an engine input: one without hooks, which cannot be reached from the stage by way of a crossing (or else the engine
would run the nodes between on part of their gradient).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from telegrad.errors import TelegradError
from telegrad.protocols.backward_messages import FINAL, Group, Layout

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge, Node

    from telegrad.autograd.context import Received

__all__ = ["Cell", "Crossing", "Foreign", "LocalGraph", "Stage", "drain_graveyard", "has_hooks", "mark_recv"]

DEEP = 2000  # nodes that torch may free recursively, see `_hold_deep`

# ---- kinds of nodes --------------------------------------------------------------------------------------------------

_INNER, _LEAF, _RECV = range(3)
_with_leaf = torch.empty(1, requires_grad=True).expand(1).grad_fn
assert _with_leaf is not None
ACCUMULATE: type = type(_with_leaf.next_functions[0][0])
del _with_leaf

_recv_types: set[type] = set()


class _Kinds(dict[type, int]):
    """Type of node -> its kind."""

    def __missing__(self, kind: type) -> int:
        found = _LEAF if kind is ACCUMULATE else _RECV if any(t in _recv_types for t in kind.__mro__) else _INNER
        if len(self) < 10_000:  # every autograd.Function has a type of its own, and programs make them in functions
            self[kind] = found
        return found


_kinds = _Kinds()


def mark_recv(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Declares that nodes of this Function are recvs. (A decorator of the class.)"""
    _recv_types.add(function._backward_cls)  # the class of its nodes
    _kinds.clear()
    return function


# ---- the graph -------------------------------------------------------------------------------------------------------


class Foreign(TelegradError):
    """A gradient reached a value that was received in another context."""


class Crossing(NamedTuple):
    """An edge out of a stage to a node that runs later, or is not captured."""

    node: Node  # in the stage
    output: int  # of its gradients
    target: Node
    input: int  # of the target


class Cell:
    """Nodes that one stage runs together. It is the cell of each node in it, in `LocalGraph.cell_of`."""

    __slots__ = ("crossings", "key", "leaves", "number", "rank")

    def __init__(self, key: tuple[int, ...], number: int) -> None:
        self.key = key  # its smallest groups
        self.number = number
        self.rank = 0  # its place in the order in which sums are made; a cell leads only to cells of higher rank
        self.crossings: dict[Cell | None, list[Crossing]] = {}  # to nodes and recvs of that cell; None: the final one
        self.leaves: list[Crossing] = []  # to leaves


class Stage(NamedTuple):
    """What one engine call runs. The final stage has no crossings, and captures all leaves."""

    cells: tuple[Cell, ...]  # empty for the final stage
    recvs: list[Received]
    leaves: list[Node]  # to capture
    crossings: Sequence[Crossing]


class LocalGraph:
    """`sources`: (id, edges), ROOT first if it is there, then by id, each once. `receipts`: those of the context."""

    def __init__(
        self, sources: Sequence[tuple[int, Sequence[GradientEdge | None]]], receipts: Iterable[Received]
    ) -> None:
        drain_graveyard()
        self.sources = dict(sources)
        self.recvs = {received.node: received for received in receipts}
        self.final = Stage((), [], [], ())
        self.groups: list[Group] = []
        self.recvs_of: list[list[Received]] = []  # group -> recvs
        self.cells_of: list[list[Cell]] = []  # group -> the cells that it runs, if they have not run
        self.cell_of: dict[Node, Cell] = {}  # nodes and recvs of other stages than the final one
        self.taint: dict[Node, int] = {}  # leaf -> the (cell, cell) pairs of crossings by which it can be reached
        self.pairs: dict[tuple[Cell, Cell | None], int] = {}  # -> bit in `taint`
        self.hooked: set[Node] = set()  # leaves whose hooks must see the whole gradient
        self.foreign: list[tuple[Node, int]] = []  # recvs of other contexts, and the sources that reach them
        if len(sources) == 1:
            self._reach()
        elif sources:
            _Planner(self)

    def layout(self) -> Layout:
        bits = {source: bit for bit, source in enumerate(self.sources)}
        final = tuple((received.id, received.peer) for received in self.final.recvs)
        return Layout(bits, tuple(self.groups), final)

    def stage(self, group: int, done: Set[Cell]) -> Stage:
        """The stage of a group, or FINAL, when the cells `done` have run."""
        if group == FINAL:
            return self.final
        cells = [cell for cell in self.cells_of[group] if cell not in done]
        cells.sort(key=lambda cell: cell.rank)
        crossings: list[Crossing] = []
        active = 0
        for cell in cells:
            for target, edges in cell.crossings.items():
                if target not in cells:
                    crossings += edges
                    active |= self.pairs[cell, target]
        leaves: dict[Node, None] = {}
        for cell in cells:
            for edge in cell.leaves:
                leaf = edge.target
                if leaf in self.hooked or self.taint.get(leaf, 0) & active:
                    crossings.append(edge)
                else:
                    leaves[leaf] = None
        return Stage(tuple(cells), self.recvs_of[group], list(leaves), crossings)

    def _reach(self) -> None:
        """All that the only source reaches."""
        final, recvs, kinds = self.final, self.recvs, _kinds
        seen: set[Any] = set()
        stack: list[Any] = []
        for edges in self.sources.values():
            stack = [(edge.node, 0) for edge in edges if edge is not None]
        nexts: Any = stack
        stack = []
        count = 0
        while True:
            for node, _ in nexts:
                if node is None or node in seen:
                    continue
                seen.add(node)
                kind = kinds[type(node)]
                if kind == _INNER:
                    stack.append(node)
                elif kind == _LEAF:
                    final.leaves.append(node)
                elif node in recvs:
                    final.recvs.append(recvs[node])
                else:
                    self.foreign.append((node, 1))
            if not stack:
                break
            count += 1
            nexts = stack.pop().next_functions
        final.recvs.sort(key=_by_id)
        if count > DEEP:
            order, after = _topological(self.sources.values())
            _hold_deep(order, after)


def _by_id(received: Received) -> int:
    return received.id


def _topological(
    starts: Iterable[Iterable[GradientEdge | None]],
) -> tuple[list[Node], dict[Node, Any]]:
    """Inner nodes, each before those that it leads to; and the edges of every node, none for leaves and recvs."""
    after: dict[Any, Any] = {}
    order: list[Any] = []
    kinds = _kinds
    stack: list[Any] = [edge.node for edges in starts for edge in edges if edge is not None]
    stack.reverse()
    pop, push = stack.pop, stack.append
    while stack:
        node = pop()
        if node is None:  # all that the next one leads to is in order
            order.append(pop())
        elif node not in after:
            if kinds[type(node)] != _INNER:
                after[node] = ()
                continue
            nexts = after[node] = node.next_functions
            push(node)
            push(None)
            for target, _ in nexts:
                if target is not None and target not in after:
                    push(target)
    order.reverse()
    return order, after


class _Planner:
    """Plans the stages of a graph with several sources, once, by three passes over its nodes in order."""

    def __init__(self, graph: LocalGraph) -> None:
        self.graph = graph
        self.order, self.after = _topological(graph.sources.values())
        self._masks()
        if self.graph.groups:
            self._cells(self._needs())
            self._crossings()
        graph.final.leaves.extend(self.leaves)
        if len(self.order) > DEEP:
            _hold_deep(self.order, self.after)

    def _masks(self) -> None:
        """Pushes sources down, and groups the recvs."""
        graph = self.graph
        mask: dict[Any, int] = {}
        get = mask.get
        for bit, edges in enumerate(graph.sources.values()):
            for edge in edges:
                if edge is not None:
                    mask[edge.node] = get(edge.node, 0) | 1 << bit
        after = self.after
        for node in self.order:
            here = mask[node]
            for target, _ in after[node]:
                if target is not None:
                    mask[target] = get(target, 0) | here
        self.mask = mask
        self.leaves = [node for node in mask if _kinds[type(node)] == _LEAF]
        full = (1 << len(graph.sources)) - 1
        by_mask: dict[int, list[Received]] = {}
        for node, reached in mask.items():
            if _kinds[type(node)] == _RECV:
                received = graph.recvs.get(node)
                if received is None:
                    graph.foreign.append((node, reached))
                else:
                    by_mask.setdefault(reached, []).append(received)
        graph.final.recvs.extend(sorted(by_mask.pop(full, ()), key=_by_id))
        for group in sorted(by_mask, key=lambda m: (m.bit_count(), m)):
            recvs = sorted(by_mask[group], key=_by_id)
            graph.groups.append(Group(group, tuple((r.id, r.peer) for r in recvs)))
            graph.recvs_of.append(recvs)

    def _needs(self) -> dict[Any, int]:
        """Node -> the groups that it is an ancestor of, by bit."""
        need: dict[Any, int] = {}
        for number, recvs in enumerate(self.graph.recvs_of):
            for received in recvs:
                need[received.node] = 1 << number
        after, get = self.after, need.get
        for node in reversed(self.order):
            here = 0
            for target, _ in after[node]:
                here |= get(target, 0)
            if here:
                need[node] = here
        return need

    def _cells(self, need: dict[Any, int]) -> None:
        """Gives each node that a group needs its cell."""
        graph = self.graph
        masks = [group.mask for group in graph.groups]
        cells: dict[tuple[int, ...], Cell] = {}
        by_need: dict[int, Cell] = {}
        graph.cells_of = [[] for _ in masks]
        for node, groups in need.items():
            cell = by_need.get(groups)
            if cell is None:
                smallest: list[int] = []
                for number in _bits(groups):  # smaller masks come first
                    if not any(masks[small] & ~masks[number] == 0 for small in smallest):
                        smallest.append(number)
                key = tuple(smallest)
                cell = cells.get(key)
                if cell is None:
                    cell = cells[key] = Cell(key, len(cells))
                    for number in key:
                        graph.cells_of[number].append(cell)
                by_need[groups] = cell
            graph.cell_of[node] = cell
        self.cells = list(cells.values())

    def _crossings(self) -> None:
        """Finds the edges that leave a cell, and by which of them each leaf can be reached."""
        graph, after = self.graph, self.after
        cell_of, pairs, leaves = graph.cell_of, graph.pairs, set(self.leaves)
        taint: dict[Any, int] = {}
        get = taint.get
        for node in self.order:
            cell = cell_of.get(node)
            above = get(node, 0)
            if cell is None and not above:
                continue
            for output, (target, number) in enumerate(after[node]):
                if target is None:
                    continue
                passed = above
                if cell is not None:
                    if target in leaves:
                        cell.leaves.append(Crossing(node, output, target, number))
                    elif (there := cell_of.get(target)) is not cell:
                        cell.crossings.setdefault(there, []).append(Crossing(node, output, target, number))
                        passed |= pairs.setdefault((cell, there), 1 << len(pairs))
                if passed:
                    taint[target] = get(target, 0) | passed
        graph.taint = {leaf: taint[leaf] for leaf in self.leaves if leaf in taint}
        graph.hooked = {edge.target for cell in self.cells for edge in cell.leaves if has_hooks(edge.target)}
        self._rank()

    def _rank(self) -> None:
        """Orders the cells: each before those that it leads to, else by key."""
        before = dict.fromkeys(self.cells, 0)
        for cell in self.cells:
            for target in cell.crossings:
                if target is not None:
                    before[target] += 1
        free = [(cell.key, cell.number, cell) for cell, count in before.items() if not count]
        heapify(free)
        rank = 0
        while free:
            cell = heappop(free)[-1]
            cell.rank = rank
            rank += 1
            for target in cell.crossings:
                if target is not None:
                    before[target] -= 1
                    if not before[target]:
                        heappush(free, (target.key, target.number, target))
        assert rank == len(self.cells), "the cells lead to each other in a circle"


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def has_hooks(leaf: Any) -> bool:
    """Whether a leaf's tensor has hooks that must see the whole gradient."""
    return bool(getattr(leaf.variable, "_backward_hooks", None))


# ---- deep graphs -----------------------------------------------------------------------------------------------------
#
# From torch 2.13 on (2.12 was not tried) a node that Python has seen keeps its Python object, and torch frees a chain
# of such nodes recursively: a chain of 20,000 overflows a stack of 8 MiB when its last tensor dies. The walk sees every
# node. So in a graph of more than DEEP nodes each node through which one enters another DEEP levels holds, in its
# `metadata`, what those levels lead on to; when it dies, that goes to the graveyard instead of the stack, and is let
# go of later, a level at a time.

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


def _hold_deep(order: Sequence[Any], after: Mapping[Any, Any]) -> None:
    depth: dict[Any, int] = {}
    get = depth.get
    for node in order:
        below = get(node, 0) + 1
        for target, _ in after[node]:
            if target is not None and get(target, 0) < below:
                depth[target] = below
    onward: dict[int, dict[Any, None]] = {}  # level -> nodes of later levels that an edge of its nodes leads to
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
