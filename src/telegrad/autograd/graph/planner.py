"""Plans the stages of a local graph in which sources meet.

Every node has a *mask*, the set of sources that reach it, and the recvs with equal masks are a group (see
protocols/backward.py). Recvs that all sources reach belong to the final stage. A group's stage runs its recvs'
ancestors, as far as no other stage has run them. Nodes that are always run by the same stage are a *cell*: those whose
smallest groups (by mask; a larger one cannot be complete earlier) are the same. A cell with one smallest group is run
by that group, whatever arrives when, so sums are made in the same order in every run; one with several, which do not
contain each other, is run by the first of them.

An edge that leaves a stage for a node that runs later is a *crossing*, unless it leads to a leaf that can be captured
as an engine input: one without hooks, which cannot be reached from the stage by way of a crossing (or else the engine
would run the nodes between on part of their gradient). For each leaf `taint` has the pairs of cells whose crossings
lead to it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

from telegrad.autograd.graph.local_graph import LEAF, RECV, CutEdge, LocalGraph, Segment, Stage, by_id, has_hooks
from telegrad.protocols.backward_messages import Group

if TYPE_CHECKING:
    from telegrad._core import Reach
    from telegrad.autograd.context import Received

__all__ = ["plan"]


def plan(graph: LocalGraph) -> None:
    """Make the groups, cells and final stage of a graph whose sources are not disjoint, from its walk."""
    reach, graph.met = graph.met, None
    assert reach is not None
    graph.groups, graph.recvs_of, graph.cells_of = [], [], []
    graph.cell_of, graph.taint, graph.pairs, graph.hooked = {}, {}, {}, set()
    graph.foreign, graph.shared, graph.stages = [], {}, []
    graph.final = Stage(1 << 60, (), [], [], [], ())
    _Planner(graph, reach)


class _Planner:
    """Four passes over the nodes, in order: masks, needs, cells, crossings."""

    def __init__(self, graph: LocalGraph, reach: Reach) -> None:
        self.graph = graph
        self.below = reach.below
        self.nodes: list[Any] = reach.nodes
        self.kinds: list[int] = reach.kinds
        self.order: list[int] = reach.order()
        self.groups: list[Group] = []
        graph.groups = self.groups
        recvs = self._masks([reach.starts(bit) for bit in range(len(graph.sources))])
        if self.groups:
            self._cells(self._needs(recvs))
            self._crossings()
        graph.final.whole.extend([n for n, kind in zip(self.nodes, self.kinds, strict=True) if kind == LEAF])

    def _masks(self, starts: list[list[int]]) -> list[list[int]]:
        """Push sources down, and group the recvs. Return the numbers of each group's recvs."""
        graph, nodes, below = self.graph, self.nodes, self.below
        mask = [0] * len(nodes)
        for bit, numbers in enumerate(starts):
            for number in numbers:
                if number >= 0:
                    mask[number] |= 1 << bit
        for here in self.order:
            reached = mask[here]
            for there in below(here):
                if there >= 0:
                    mask[there] |= reached
        by_mask: dict[int, list[int]] = {}
        for number, kind in enumerate(self.kinds):
            if kind == RECV:
                if nodes[number] in graph.recvs:
                    by_mask.setdefault(mask[number], []).append(number)
                else:
                    graph.foreign.append((nodes[number], mask[number]))
        full = (1 << len(graph.sources)) - 1
        graph.final.recvs.extend(self._recvs(by_mask.pop(full, [])))
        masks = sorted(by_mask, key=lambda m: (m.bit_count(), m))
        for group in masks:
            recvs = self._recvs(by_mask[group])
            self.groups.append(Group(group, tuple((r.id, r.peer) for r in recvs)))
            graph.recvs_of.append(recvs)
        return [by_mask[group] for group in masks]

    def _recvs(self, numbers: list[int]) -> list[Received]:
        return sorted([self.graph.recvs[self.nodes[number]] for number in numbers], key=by_id)

    def _needs(self, recvs: list[list[int]]) -> list[int]:
        """Return for each node the groups that it is an ancestor of, by bit."""
        need = [0] * (len(self.nodes) + 1)  # the last stands for nowhere
        for group, numbers in enumerate(recvs):
            for number in numbers:
                need[number] = 1 << group
        below = self.below
        for here in reversed(self.order):
            groups = 0
            for there in below(here):
                groups |= need[there]
            need[here] = groups
        return need

    def _cells(self, need: list[int]) -> None:
        """Gives each node that a group needs its cell."""
        graph = self.graph
        masks = [group.mask for group in self.groups]
        cells: dict[tuple[int, ...], Segment] = {}
        by_need: dict[int, Segment] = {}
        graph.cells_of = [[] for _ in masks]
        self.cell: list[Segment | None] = [None] * len(self.nodes)
        for here, node in enumerate(self.nodes):
            groups = need[here]
            if not groups:
                continue
            cell = by_need.get(groups)
            if cell is None:
                smallest: list[int] = []
                for number in _bits(groups):  # smaller masks come first
                    if not any(masks[small] & ~masks[number] == 0 for small in smallest):
                        smallest.append(number)
                key = tuple(smallest)
                cell = cells.get(key)
                if cell is None:
                    cell = cells[key] = Segment(key, len(cells))
                    for number in key:
                        graph.cells_of[number].append(cell)
                by_need[groups] = cell
            graph.cell_of[node] = self.cell[here] = cell
        self.cells = list(cells.values())

    def _crossings(self) -> None:
        """Finds the edges that leave a cell, and by which of them each leaf can be reached."""
        graph, cells = self.graph, self.cell
        pairs, nodes, below, kinds = graph.pairs, self.nodes, self.below, self.kinds
        taint = [0] * len(nodes)
        for here in self.order:
            cell = cells[here]
            above = taint[here]
            if cell is None and not above:
                continue
            for output, there in enumerate(below(here)):
                if there < 0:
                    continue
                passed = above
                if cell is not None and cells[there] is not cell:
                    node = nodes[here]
                    edge = CutEdge(node, output, nodes[there], node.next_functions[output][1])
                    if kinds[there] == LEAF:
                        cell.leaves.append(edge)
                    else:
                        target = cells[there]
                        cell.crossings.setdefault(target, []).append(edge)
                        passed |= pairs.setdefault((cell, target), 1 << len(pairs))
                if passed:
                    taint[there] |= passed
        graph.taint = {id(nodes[n]): taint[n] for n, kind in enumerate(kinds) if kind == LEAF and taint[n]}
        leaves: list[Any] = [edge.target for cell in self.cells for edge in cell.leaves]
        graph.hooked = {id(leaf) for leaf in leaves if has_hooks(leaf)}
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
