"""The local graph of one pass: a walk from its sources, and its stages.

A source is a send recorded at this worker, or the root (`ROOT`, the call of `backward`). Each has the edges where its
gradients enter. The walk goes from all sources to leaves and recvs, in time linear in nodes and edges.

**Disjoint sources.** Usually no two sources reach the same node, except leaves. Examples are a single source, the
replies of a server, and the micro-batches of a pipeline. Then each source is a stage of its own, which runs all nodes
that the source reaches, once its gradients have arrived. A leaf that several sources reach is captured by each stage,
and the partial gradients are added (`leaves.py`). If sources meet, `planner.py` creates the stages from the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from telegrad._core import GraphWalk
from telegrad.autograd.ddp import has_ddp_param
from telegrad.autograd.graph.deep_graph import RecursionGuard
from telegrad.errors import TelegradError
from telegrad.protocols.backward_messages import FINAL, ROOT, Group, Layout
from telegrad.wire import NodeKind

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from telegrad.autograd.context import Entry, Received, Sent

__all__ = [
    "LEAF",
    "RECV",
    "CutEdge",
    "Edges",
    "ForeignRecvError",
    "GraphSegment",
    "LocalGraph",
    "Stage",
    "by_id",
    "ends_of",
    "has_hooks",
    "is_outer",
    "kinds",
]

INNER, LEAF, RECV = map(int, NodeKind)
_with_leaf = torch.empty(1, requires_grad=True).expand(1).grad_fn
assert _with_leaf is not None
_ACCUMULATE: type = type(_with_leaf.next_functions[0][0])
del _with_leaf

_recv_types: set[type] = set()


class _Kinds(dict[type, int]):
    """Kinds of nodes, by type."""

    def __missing__(self, kind: type) -> int:
        found = INNER
        if kind is _ACCUMULATE:
            found = LEAF
        elif issubclass(kind, BackwardCFunction):
            found = INNER if _recv_types.isdisjoint(kind.__mro__) else RECV
        if len(self) < 10_000:  # every autograd.Function has its own type, and programs may define them in functions
            self[kind] = found
        return found


kinds: _Kinds = _Kinds()


def mark_recv(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Declare that nodes of this Function are recvs (decorator of the class)."""
    _recv_types.add(function._backward_cls)  # the class of its nodes
    kinds.clear()
    return function


def ends_of(edges: Edges) -> list[Node]:
    """Return the recvs that edges lead to."""
    reach = GraphWalk(kinds, RecursionGuard)
    try:
        return cast("list[Node]", reach.walk(edges)[1])
    finally:
        if reach.guard is not None:
            cast("RecursionGuard", reach.guard).close()


def is_outer(node: Node) -> bool:
    """Return whether a recv is that of a tensor received outside of contexts."""
    return getattr(node, "receipt", None) is not None


def has_hooks(leaf: Tensor) -> bool:
    """Return whether a leaf has tensor hooks, which must get the complete gradient."""
    return bool(getattr(leaf, "_backward_hooks", None))


class ForeignRecvError(TelegradError):
    """A gradient reached a tensor that was received in another context."""


class CutEdge(NamedTuple):
    """An edge from a stage to a node that runs later, or to a leaf not captured."""

    node: Node  # in the stage
    output: int  # of its gradients
    target: Node | Tensor  # a leaf's tensor
    input: int  # of the target


class GraphSegment:
    """Nodes that always run in the same stage (see planner.py)."""

    __slots__ = ("cut_edges", "key", "leaves", "number", "rank")

    def __init__(self, key: tuple[int, ...], number: int) -> None:
        self.key: tuple[int, ...] = key
        self.number: int = number
        self.rank: int = 0  # order of sums; a segment leads only to segments of higher rank
        self.cut_edges: dict[
            GraphSegment | None, list[CutEdge]
        ] = {}  # by the segment of the target; None: the final stage
        self.leaves: list[CutEdge] = []  # to leaves


class Stage(NamedTuple):
    """The nodes that one engine call runs."""

    rank: int  # of sums
    segments: Sequence[GraphSegment]  # empty for disjoint sources, and in the final stage
    recvs: list[Received]
    complete_leaves: list[Tensor]  # leaves to capture, with the complete gradient
    partial_leaves: list[Tensor]  # leaves to capture, with a part of the gradient
    cut_edges: Sequence[CutEdge]
    outer: list[Node]  # nodes of tensors received outside of contexts, which are leaves for a context


_NO_STAGE = Stage(1 << 60, (), [], [], [], (), [])  # the final stage of several disjoint sources

Edges: TypeAlias = Sequence["GradientEdge | Tensor | None"]
"""Edges of a source; a leaf is its tensor."""


class LocalGraph:
    """The graph below some sources, and its stages.

    Args:
        roots: At the root of the pass, the roots: the edges of ROOT.
        records: The sends; they are sorted.
        receipts: The messages received in the context.
        find_received: In a plain context, instead: returns the record of a recv by its node, or None. The graph is then
            one of several subgraphs (`plain/stages.py`). Each stage accumulates its leaves on its own, and all recvs
            belong to groups.

    Attributes:
        sources: The edges of each source, ROOT first if there are roots, then by id; in a plain context those of each
            `extend` follow.
        walk: The walk, until `planner.plan` has created the stages from it; None if the sources are disjoint. In a
            plain context always the walk, until its user removes it.
        leaves: The leaves, some of them several times.
        foreign: Recvs of other contexts, each with the mask of sources that reach it.
        shared: The id of a leaf -> the sources that reach it, by bit, if there are several. Disjoint sources only.
    """

    __slots__ = (
        *(
            "bits",
            "segment_of",
            "segments_of",
            "final",
            "foreign",
            "groups",
            "hooked",
            "is_disjoint",
            "is_subgraph",
            "leaves",
        ),
        *("pairs", "recvs", "recvs_of", "shared", "sources", "stages", "taint", "walk"),
        *("_are_leaves_simple", "_find_received"),
    )
    # Set by planner.py if sources meet:
    recvs_of: list[list[Received]]  # group -> recvs
    segments_of: list[list[GraphSegment]]  # group -> the segments that it runs, unless they have run
    segment_of: dict[Node, GraphSegment]  # nodes and recvs of other stages than the final one
    taint: dict[int, int]  # id of a leaf -> the pairs of segments with cut edges that lead to it
    pairs: dict[tuple[GraphSegment, GraphSegment | None], int]  # -> bit in `taint`
    hooked: set[int]  # ids of leaves with hooks

    def __init__(
        self,
        roots: Sequence[Entry],
        records: list[Sent],
        receipts: Iterable[Received],
        find_received: Callable[[Node], Received | None] | None = None,
    ) -> None:
        self.sources: dict[int, Edges] = {}
        self.bits: dict[int, int] = {}
        self.recvs: dict[Node, Received] = {}
        for received in receipts:
            self.recvs[received.node] = received
        self.groups: list[Group] | None = None  # created when needed
        self.final: Stage = _NO_STAGE
        self.foreign: list[tuple[Node, int]] = []
        self.shared: dict[int, list[int]] = {}
        self.stages: list[Stage] = []  # of disjoint sources, by bit
        self.is_subgraph: bool = find_received is not None
        self.leaves: list[Tensor] = []
        self.is_disjoint: bool = True
        self.walk: GraphWalk | None = GraphWalk(kinds, RecursionGuard)
        self._find_received = find_received
        self._are_leaves_simple = True  # none that several sources reach needs the final stage
        if roots:
            entries: list[Entry | None] = []
            for root in roots:
                node = root.grad_fn if isinstance(root, Tensor) else None
                entries.append(root if node is None else GradientEdge(node, root.output_nr))
            self.sources[ROOT] = entries
        if roots or records:
            self.extend(records)
        if self.is_disjoint and find_received is None:
            self.walk = None

    def extend(self, records: list[Sent]) -> None:
        """Walk on from further sends, in a plain context and before the graph is used."""
        if len(records) > 1:
            records.sort(key=by_id)
        sources = self.sources
        for sent in records:
            edges: Edges = sent.edges
            for edge in edges:
                if isinstance(edge, Tensor) and not edge.requires_grad:  # a leaf that required grad when it was sent
                    edges = [None if isinstance(e, Tensor) and not e.requires_grad else e for e in edges]
                    break
            sources[sent.id] = edges
        reach = self.walk
        assert reach is not None
        if reach.guard is not None:
            cast("RecursionGuard", reach.guard).resume()
        try:
            self.is_disjoint = self._walk(reach, list(sources)[len(self.bits) :])
        finally:
            if reach.guard is not None:
                cast("RecursionGuard", reach.guard).close()

    def _walk(self, reach: GraphWalk, new: Sequence[int]) -> bool:
        """Walk from new sources; return whether each source can be a stage of its own.

        They can if they are disjoint and no leaf needs the final stage."""
        recvs, stages, find_received = self.recvs, self.stages, self._find_received
        for bit, source in enumerate(new, len(stages)):
            self.bits[source] = bit
            leaves, ends, shared = reach.walk(self.sources[source])
            found: list[Received] = []
            outer: list[Node] = []
            for node in ends:
                received = recvs.get(node) if find_received is None else find_received(node)
                if received is not None:
                    found.append(received)
                    recvs[node] = received
                elif find_received is None and is_outer(node):
                    outer.append(node)
                else:
                    self.foreign.append((node, 1 << bit))
            if len(found) > 1:
                found.sort(key=by_id)
            stages.append(Stage(bit, (), found, leaves, [], (), outer))
            for leaf, before in shared:
                self._are_leaves_simple &= not has_hooks(leaf)
                if find_received is None:
                    self.shared.setdefault(id(leaf), [before]).append(bit)
                else:
                    self._are_leaves_simple &= not getattr(leaf, "_post_accumulate_grad_hooks", None)
            self.leaves += leaves
        is_alone = self.is_subgraph and len(stages) == 1  # nothing else takes part
        if not is_alone and (reach.sources_meet or not self._are_leaves_simple or has_ddp_param(self.leaves)):
            return False
        self.final = stages[0] if len(stages) == 1 else _NO_STAGE  # a single source is also the final stage
        if self.shared:
            for stage in stages:
                stage.partial_leaves.extend([leaf for leaf in stage.complete_leaves if id(leaf) in self.shared])
                stage.complete_leaves[:] = [leaf for leaf in stage.complete_leaves if id(leaf) not in self.shared]
        return True

    def layout(self) -> Layout:
        """Return the graph as the schedule needs it."""
        if self.groups is None:
            stages = self.stages if len(self.stages) > 1 or self.is_subgraph else ()
            self.groups = [Group(1 << stage.rank, _pairs(stage.recvs)) for stage in stages]
        return Layout(self.bits, list(self.groups), () if self.is_subgraph else _pairs(self.final.recvs))

    def single_peer(self, worker_id: int) -> int | None:
        """Return the only worker that gets gradients; None if there is no fast path.

        The fast path needs a root that leads to recvs of one other worker, and sends that lead only to leaves, each to
        different ones.

        Args:
            worker_id: This worker.
        """
        if not self.is_disjoint or self.shared:
            return None
        root, *others = self.stages
        peers = set(map(_peer_of, root.recvs))
        if len(peers) != 1 or worker_id in peers:
            return None
        for stage in others:
            if stage.recvs:
                return None
        return peers.pop()

    def leads_back(self, source: int, peer: int) -> bool:
        """Return whether the only source leads just to leaves and recvs from `peer`.

        Args:
            source: The source.
            peer: The sender of its gradients.
        """
        return len(self.bits) == 1 and source in self.bits and {peer}.issuperset(map(_peer_of, self.final.recvs))

    def stage(self, group: int, done: Set[GraphSegment]) -> Stage:
        """Return the stage of a group, or FINAL, after the segments `done` have run.

        To be called if sources meet."""
        if group == FINAL:
            return self.final
        segments = [segment for segment in self.segments_of[group] if segment not in done]
        segments.sort(key=attrgetter("rank"))
        cut_edges: list[CutEdge] = []
        active = 0
        for segment in segments:
            for target, edges in segment.cut_edges.items():
                if target not in segments:
                    cut_edges += edges
                    active |= self.pairs[segment, target]
        leaves: dict[int, Tensor] = {}
        for segment in segments:
            for edge in segment.leaves:
                leaf = id(edge.target)
                if leaf in self.hooked or self.taint.get(leaf, 0) & active:
                    cut_edges.append(edge)
                else:
                    leaves[leaf] = cast("Tensor", edge.target)
        return Stage(segments[-1].rank, segments, self.recvs_of[group], [], list(leaves.values()), cut_edges, [])


by_id: attrgetter[int] = attrgetter("id")
_peer_of: attrgetter[int] = attrgetter("peer")


def _pairs(recvs: Sequence[Received]) -> tuple[tuple[int, int], ...]:
    return tuple([(received.id, received.peer) for received in recvs])
