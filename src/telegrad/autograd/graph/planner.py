"""Plans the stages of a local graph in which sources meet.

Every node has a *mask*, the set of sources that reach it. Recvs with equal masks form a group (see
protocols/backward.py); recvs that all sources reach belong to the final stage, except in a plain context. A group's
stage runs those ancestors of its recvs that no other stage has run. Nodes with the same smallest groups (by mask; a
larger group cannot be complete earlier) form a *graph segment*: they always run in the same stage. With one smallest
group, that group's stage runs the segment, in any order of arrival, so that sums have the same order in every run. With
several smallest groups, of which none contains another, the first one to be complete runs the segment.

An edge from a stage to a node that runs later is a *cut edge*, unless it leads to a leaf that can be captured as an
engine input: a leaf without hooks that cannot be reached from the stage through another cut edge. (Otherwise the engine
would run the nodes between on part of their gradients.) `taint` has, for each leaf, the pairs of segments with cut
edges that lead to it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, cast

from telegrad.autograd.graph.local_graph import (
    LEAF,
    RECV,
    CutEdge,
    GraphSegment,
    LocalGraph,
    Stage,
    by_id,
    has_hooks,
    is_outer,
)
from telegrad.protocols.backward_messages import Group

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    from telegrad._core import GraphWalk
    from telegrad.autograd.context import Received

__all__ = ["plan"]


def plan(graph: LocalGraph) -> None:
    """Create groups, segments and final stage of a graph with sources that meet."""
    reach, graph.walk = graph.walk, None
    assert reach is not None
    graph.groups, graph.recvs_of, graph.segments_of = [], [], []
    graph.segment_of, graph.taint, graph.pairs, graph.hooked = {}, {}, {}, set()
    graph.foreign, graph.shared, graph.stages = [], {}, []
    graph.final = Stage(1 << 60, (), [], [], [], (), [])
    _Planner(graph, reach)


class _Planner:
    """Four linear passes over the nodes: masks, needs, segments, cut edges."""

    def __init__(self, graph: LocalGraph, reach: GraphWalk) -> None:
        self.graph = graph
        self.below = reach.below
        self.nodes: list[Node] = reach.nodes
        self.kinds: list[int] = reach.kinds
        self.order: list[int] = reach.order()
        self.groups: list[Group] = []
        graph.groups = self.groups
        recvs = self._masks([reach.starts(bit) for bit in range(len(graph.sources))])
        if self.groups:
            self._segments(self._needs(recvs))
            self._cut_edges()
        leaves = [n for n, kind in zip(self.nodes, self.kinds, strict=True) if kind == LEAF]
        graph.final.complete_leaves.extend(cast("list[Tensor]", leaves))

    def _masks(self, starts: list[list[int]]) -> list[list[int]]:
        """Push masks down, and group the recvs. Return the numbers of each group's recvs."""
        graph, nodes, below = self.graph, self.nodes, self.below
        mask = [0] * len(nodes)
        for bit, numbers in enumerate(starts):
            for number in numbers:
                if number >= 0:
                    mask[number] |= 1 << bit
        for upper in self.order:
            reached = mask[upper]
            for lower in below(upper):
                if lower >= 0:
                    mask[lower] |= reached
        by_mask: dict[int, list[int]] = {}
        for number, kind in enumerate(self.kinds):
            if kind == RECV:
                if nodes[number] in graph.recvs:
                    by_mask.setdefault(mask[number], []).append(number)
                elif not graph.is_subgraph and is_outer(nodes[number]):
                    graph.final.outer.append(nodes[number])
                else:
                    graph.foreign.append((nodes[number], mask[number]))
        if not graph.is_subgraph:
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
        """Return for each node the groups of which it is an ancestor, by bit."""
        need = [0] * (len(self.nodes) + 1)  # the last entry is for edges without a target, number -1
        for group, numbers in enumerate(recvs):
            for number in numbers:
                need[number] = 1 << group
        below = self.below
        for upper in reversed(self.order):
            groups = 0
            for lower in below(upper):
                groups |= need[lower]
            need[upper] = groups
        return need

    def _segments(self, need: list[int]) -> None:
        """Assign the nodes that some group needs to segments."""
        graph = self.graph
        masks = [group.mask for group in self.groups]
        segments: dict[tuple[int, ...], GraphSegment] = {}
        by_need: dict[int, GraphSegment] = {}
        graph.segments_of = [[] for _ in masks]
        self.segment: list[GraphSegment | None] = [None] * len(self.nodes)
        for upper, node in enumerate(self.nodes):
            groups = need[upper]
            if not groups:
                continue
            segment = by_need.get(groups)
            if segment is None:
                smallest: list[int] = []
                for number in _bits(groups):  # smaller masks come first
                    if not any(masks[small] & ~masks[number] == 0 for small in smallest):
                        smallest.append(number)
                key = tuple(smallest)
                segment = segments.get(key)
                if segment is None:
                    segment = segments[key] = GraphSegment(key, len(segments))
                    for number in key:
                        graph.segments_of[number].append(segment)
                by_need[groups] = segment
            graph.segment_of[node] = self.segment[upper] = segment
        self.segments = list(segments.values())

    def _cut_edges(self) -> None:
        """List the edges that leave a segment, and the cut edges that reach each leaf."""
        graph, segments = self.graph, self.segment
        pairs, nodes, below, kinds = graph.pairs, self.nodes, self.below, self.kinds
        taint = [0] * len(nodes)
        for upper in self.order:
            segment = segments[upper]
            above = taint[upper]
            if segment is None and not above:
                continue
            for output, lower in enumerate(below(upper)):
                if lower < 0:
                    continue
                passed = above
                if segment is not None and segments[lower] is not segment:
                    node = nodes[upper]
                    edge = CutEdge(node, output, nodes[lower], node.next_functions[output][1])
                    if kinds[lower] == LEAF:
                        segment.leaves.append(edge)
                    else:
                        target = segments[lower]
                        segment.cut_edges.setdefault(target, []).append(edge)
                        passed |= pairs.setdefault((segment, target), 1 << len(pairs))
                if passed:
                    taint[lower] |= passed
        graph.taint = {id(nodes[n]): taint[n] for n, kind in enumerate(kinds) if kind == LEAF and taint[n]}
        leaves = [cast("Tensor", edge.target) for segment in self.segments for edge in segment.leaves]
        graph.hooked = {id(leaf) for leaf in leaves if has_hooks(leaf)}
        self._rank()

    def _rank(self) -> None:
        """Order the segments topologically, and by key."""
        before = dict.fromkeys(self.segments, 0)
        for segment in self.segments:
            for target in segment.cut_edges:
                if target is not None:
                    before[target] += 1
        free = [(segment.key, segment.number, segment) for segment, count in before.items() if not count]
        heapify(free)
        rank = 0
        while free:
            segment = heappop(free)[-1]
            segment.rank = rank
            rank += 1
            for target in segment.cut_edges:
                if target is not None:
                    before[target] -= 1
                    if not before[target]:
                        heappush(free, (target.key, target.number, target))
        assert rank == len(self.segments), "the segments form a cycle"


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
