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
from typing import TYPE_CHECKING

from telegrad.autograd.graph import LEAF, RECV, Cell, Crossing, LocalGraph, Walk, by_id, has_hooks
from telegrad.protocols.backward_messages import Group

if TYPE_CHECKING:
    from telegrad.autograd.context import Received

__all__ = ["plan"]


def plan(graph: LocalGraph) -> None:
    """Fills in the groups, cells and final stage of a graph that is no forest."""
    _Planner(graph)


class _Planner:
    """Four passes over the nodes, in order: masks, needs, cells, crossings."""

    def __init__(self, graph: LocalGraph) -> None:
        self.graph = graph
        self.walk = Walk(graph.sources.values())
        self._masks()
        if graph.groups:
            self._cells(self._needs())
            self._crossings()
        graph.final.whole.extend([n for n, kind in zip(self.walk.nodes, self.walk.kinds, strict=True) if kind == LEAF])

    def _masks(self) -> None:
        """Pushes sources down, and groups the recvs."""
        graph, walk = self.graph, self.walk
        mask = [0] * len(walk.nodes)
        for bit, edges in enumerate(graph.sources.values()):
            for edge in edges:
                if edge is not None:
                    mask[walk.number_of[edge.node]] |= 1 << bit
        below = walk.below
        for here in walk.order:
            reached = mask[here]
            for there in below(here):
                if there >= 0:
                    mask[there] |= reached
        by_mask: dict[int, list[Received]] = {}
        for number, kind in enumerate(walk.kinds):
            if kind == RECV:
                received = graph.recvs.get(walk.nodes[number])
                if received is None:
                    graph.foreign.append((walk.nodes[number], mask[number]))
                else:
                    by_mask.setdefault(mask[number], []).append(received)
        full = (1 << len(graph.sources)) - 1
        graph.final.recvs.extend(sorted(by_mask.pop(full, ()), key=by_id))
        for group in sorted(by_mask, key=lambda m: (m.bit_count(), m)):
            recvs = sorted(by_mask[group], key=by_id)
            graph.groups.append(Group(group, tuple((r.id, r.peer) for r in recvs)))
            graph.recvs_of.append(recvs)

    def _needs(self) -> list[int]:
        """For each node the groups that it is an ancestor of, by bit."""
        walk = self.walk
        need = [0] * (len(walk.nodes) + 1)  # the last stands for nowhere
        for group, recvs in enumerate(self.graph.recvs_of):
            for received in recvs:
                need[walk.number_of[received.node]] = 1 << group
        below = walk.below
        for here in reversed(walk.order):
            groups = 0
            for there in below(here):
                groups |= need[there]
            need[here] = groups
        return need

    def _cells(self, need: list[int]) -> None:
        """Gives each node that a group needs its cell."""
        graph = self.graph
        masks = [group.mask for group in graph.groups]
        cells: dict[tuple[int, ...], Cell] = {}
        by_need: dict[int, Cell] = {}
        graph.cells_of = [[] for _ in masks]
        self.cell: list[Cell | None] = [None] * len(self.walk.nodes)
        for here, node in enumerate(self.walk.nodes):
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
                    cell = cells[key] = Cell(key, len(cells))
                    for number in key:
                        graph.cells_of[number].append(cell)
                by_need[groups] = cell
            graph.cell_of[node] = self.cell[here] = cell
        self.cells = list(cells.values())

    def _crossings(self) -> None:
        """Finds the edges that leave a cell, and by which of them each leaf can be reached."""
        graph, walk, cells = self.graph, self.walk, self.cell
        pairs, nodes, below, kinds = graph.pairs, walk.nodes, walk.below, walk.kinds
        taint = [0] * len(nodes)
        for here in walk.order:
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
                    edge = Crossing(node, output, nodes[there], node.next_functions[output][1])
                    if kinds[there] == LEAF:
                        cell.leaves.append(edge)
                    else:
                        target = cells[there]
                        cell.crossings.setdefault(target, []).append(edge)
                        passed |= pairs.setdefault((cell, target), 1 << len(pairs))
                if passed:
                    taint[there] |= passed
        graph.taint = {nodes[n]: taint[n] for n, kind in enumerate(kinds) if kind == LEAF and taint[n]}
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
