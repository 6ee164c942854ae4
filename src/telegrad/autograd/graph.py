"""One worker's local graph, walked once for a pass: its leaves and recvs, and the stages in which it runs.

A source is a send recorded here, or the root (`ROOT`, the call of `backward`); each has the edges where its gradients
enter. The walk goes from all sources down to leaves and recvs, iteratively, in time linear in nodes and edges.

**A forest.** Most often no two sources reach the same node, leaves apart: one source and nothing else; a server's
replies; the micro-batches of a pipeline. Then each source is a stage of its own that runs all it reaches when its
gradients have arrived. A leaf that several sources reach is captured by each, and added up (`leaves.py`). Where sources
do meet, `planning.py` takes over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from telegrad._core import Reach
from telegrad.autograd.ddp import any_reduced
from telegrad.autograd.deep import Descent
from telegrad.errors import TelegradError
from telegrad.protocols.backward_messages import FINAL, Group, Layout

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge, Node

    from telegrad.autograd.context import Received

__all__ = [
    "ACCUMULATE",
    "Cell",
    "Crossing",
    "Foreign",
    "LocalGraph",
    "Stage",
    "Walk",
    "by_id",
    "goes_to_the_ends",
    "has_hooks",
    "mark_recv",
]

INNER, LEAF, RECV, OWN = range(4)  # OWN: inner nodes that may run code of the program, torch.autograd.Functions
_MANY = 16  # nodes for each recv, from which on running it takes less than telling the engine to stop there
_with_leaf = torch.empty(1, requires_grad=True).expand(1).grad_fn
assert _with_leaf is not None
ACCUMULATE: type = type(_with_leaf.next_functions[0][0])
del _with_leaf

_recv_types: set[type] = set()


class _Kinds(dict[type, int]):
    """Type of node -> its kind."""

    def __missing__(self, kind: type) -> int:
        found = INNER
        if kind is ACCUMULATE:
            found = LEAF
        elif issubclass(kind, BackwardCFunction):
            found = OWN if _recv_types.isdisjoint(kind.__mro__) else RECV
        elif kind.__name__ == "CopySlices":  # it may have such a Function within
            found = OWN
        if len(self) < 10_000:  # every autograd.Function has a type of its own, and programs make them in functions
            self[kind] = found
        return found


kinds: _Kinds = _Kinds()


def mark_recv(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Declares that nodes of this Function are recvs. (A decorator of the class.)"""
    _recv_types.add(function._backward_cls)  # the class of its nodes
    kinds.clear()
    return function


def has_hooks(leaf: Any) -> bool:
    """Whether the tensor of a leaf's node has hooks, which must see the whole gradient."""
    return bool(getattr(leaf.variable, "_backward_hooks", None))


class Foreign(TelegradError):
    """A gradient reached a value that was received in another context."""


class Crossing(NamedTuple):
    """An edge out of a stage to a node that runs later, or to a leaf that is not captured."""

    node: Node  # in the stage
    output: int  # of its gradients
    target: Node
    input: int  # of the target


class Cell:
    """Nodes that are always run by the same stage (see planning.py)."""

    __slots__ = ("crossings", "key", "leaves", "number", "rank")

    def __init__(self, key: tuple[int, ...], number: int) -> None:
        self.key: tuple[int, ...] = key
        self.number: int = number
        self.rank: int = 0  # its place in the order in which sums are made; a cell leads only to cells of higher rank
        self.crossings: dict[Cell | None, list[Crossing]] = {}  # to nodes and recvs of that cell; None: the final stage
        self.leaves: list[Crossing] = []  # to leaves


class Stage(NamedTuple):
    """What one engine call runs."""

    rank: int  # of sums
    cells: tuple[Cell, ...]  # none in a forest and in the final stage
    recvs: list[Received]
    whole: list[Node]  # leaves to capture whose gradient is whole
    parts: list[Node]  # leaves to capture, of whose gradient this is a part
    crossings: Sequence[Crossing]


_NOTHING = Stage(1 << 60, (), [], [], [], ())  # what the final stage of a forest captures


class LocalGraph:
    """`sources`: (id, edges), ROOT first if it is there, then by id, each once. `receipts`: those of the context."""

    __slots__ = (
        *("bits", "cell_of", "cells_of", "final", "foreign", "groups", "hooked", "is_forest", "only_recvs"),
        *("pairs", "recvs", "recvs_of", "shared", "sources", "_stages", "taint"),
    )

    def __init__(
        self, sources: Sequence[tuple[int, Sequence[GradientEdge | None]]], receipts: Iterable[Received]
    ) -> None:
        self.sources: dict[int, Sequence[GradientEdge | None]] = dict(sources)
        self.bits: dict[int, int] = {source: bit for bit, source in enumerate(self.sources)}
        self.recvs: dict[Node, Received] = {received.node: received for received in receipts}
        self.groups: list[Group] = []
        self.final: Stage = _NOTHING
        self.foreign: list[tuple[Node, int]] = []  # recvs of other contexts, and the sources that reach them
        self.is_forest: bool = True
        # In a forest:
        self.shared: dict[Node, list[int]] = {}  # leaf -> its sources, by bit, where there are several
        # Sources, by bit, that lead past many nodes, none of them OWN, to recvs and nothing else.
        self.only_recvs: int = 0
        self._stages: list[Stage] = []  # by group
        with Descent() as descent:
            planted = self._plant(descent)
        if not planted:
            from telegrad.autograd.planning import plan

            self.is_forest = False
            self.recvs_of: list[list[Received]] = []  # group -> recvs
            self.cells_of: list[list[Cell]] = []  # group -> the cells that it runs, if they have not run
            self.cell_of: dict[Node, Cell] = {}  # nodes and recvs of other stages than the final one
            self.taint: dict[Node, int] = {}  # leaf -> the pairs of cells whose crossings lead to it
            self.pairs: dict[tuple[Cell, Cell | None], int] = {}  # -> bit in `taint`
            self.hooked: set[Node] = set()  # leaves with hooks
            self.groups, self.foreign, self.shared, self.only_recvs = [], [], {}, 0
            self.final = Stage(1 << 60, (), [], [], [], ())
            plan(self)

    def layout(self) -> Layout:
        return Layout(self.bits, tuple(self.groups), tuple([(r.id, r.peer) for r in self.final.recvs]))

    def stage(self, group: int, done: Set[Cell]) -> Stage:
        """The stage of a group, or FINAL, when the cells `done` have run."""
        if group == FINAL:
            return self.final
        if self.is_forest:
            return self._stages[group]
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
        return Stage(cells[-1].rank, tuple(cells), self.recvs_of[group], [], list(leaves), crossings)

    def _plant(self, descent: Descent) -> bool:
        """Walks from one source after the other; False where two of them meet."""
        recvs, shared = self.recvs, self.shared
        reach = Reach(kinds)
        leaves: list[Any] = []
        for bit, edges in enumerate(self.sources.values()):
            stage = Stage(bit, (), [], [], [], ())
            self._stages.append(stage)
            inner, plain = reach.inner, reach.plain
            ends = reach.walk([edge.node for edge in edges if edge is not None], bit, descent)
            if ends is None:
                return False
            for node, before in ends:
                if kinds[type(node)] == LEAF:
                    if before is not None:
                        if node in shared:
                            shared[node].append(bit)
                        elif has_hooks(node):
                            return False
                        else:
                            shared[node] = [before, bit]
                    stage.whole.append(node)
                elif node in recvs:
                    stage.recvs.append(recvs[node])
                else:
                    self.foreign.append((node, 1 << bit))
            if len(stage.recvs) > 1:
                stage.recvs.sort(key=by_id)
            if goes_to_the_ends(len(stage.recvs), len(ends), reach.inner - inner, reach.plain - plain):
                self.only_recvs |= 1 << bit
            leaves += stage.whole
        if any_reduced(leaves):
            return False
        if len(self._stages) == 1:  # then it comes last, too
            self.final = self._stages[0]
            return True
        if shared:
            for stage in self._stages:
                stage.parts.extend([leaf for leaf in stage.whole if leaf in shared])
                stage.whole[:] = [leaf for leaf in stage.whole if leaf not in shared]
        self.groups = [
            Group(1 << stage.rank, tuple([(received.id, received.peer) for received in stage.recvs]))
            for stage in self._stages
        ]
        return True


def by_id(received: Received) -> int:
    return received.id


def goes_to_the_ends(recvs: int, ends: int, inner: int, plain: int) -> bool:
    """Does a source lead past many nodes, all of them `plain` (see `Reach.plain`), to recvs and nothing else?"""
    return recvs == ends and plain == inner >= _MANY * ends > 0


class Walk:
    """All nodes below some edges, numbered; a graph of integers, so that the garbage collector has nothing to look at.

    Attributes:
        nodes: by number.
        kinds: INNER, LEAF, RECV or OWN, by number.
        order: the inner ones, each before those that it leads to.
    """

    __slots__ = ("_begin", "_end", "_targets", "kinds", "nodes", "number_of", "order")
    nodes: list[Any]
    kinds: list[int]
    order: list[int]
    number_of: dict[Any, int]

    def __init__(self, starts: Iterable[Iterable[GradientEdge | None]]) -> None:
        with Descent() as descent:
            self._walk(starts, descent)

    def _walk(self, starts: Iterable[Iterable[GradientEdge | None]], descent: Descent) -> None:
        nodes: list[Any] = []
        kind_of: list[int] = []
        begin: list[int] = []
        end: list[int] = []
        targets: list[int] = []  # of all nodes, those of one node together; -1 where an edge leads nowhere
        order: list[int] = []
        number_of: dict[Any, int] = {}
        stack: list[int] = []
        inner = 0
        roots = [edge.node for edges in starts for edge in edges if edge is not None]
        for node in reversed(roots):
            number = number_of.get(node)
            if number is None:
                number = number_of[node] = len(nodes)
                nodes.append(node)
                kind_of.append(kinds[type(node)])
                begin.append(-1)
                end.append(-1)
            stack.append(number)
        pop, push = stack.pop, stack.append
        while stack:
            here = pop()
            if here < 0:  # all that this one leads to is in order
                order.append(~here)
            elif begin[here] < 0:
                begin[here] = len(targets)
                if kind_of[here] == INNER or kind_of[here] == OWN:
                    push(~here)
                    nexts: Any = nodes[here].next_functions
                    inner += 1
                    if inner == descent.at:
                        descent.pass_by(nodes[here], nexts)
                    for node, _ in nexts:
                        if node is None:
                            targets.append(-1)
                            continue
                        number = number_of.get(node)
                        if number is None:
                            number = number_of[node] = len(nodes)
                            nodes.append(node)
                            kind_of.append(kinds[type(node)])
                            begin.append(-1)
                            end.append(-1)
                        targets.append(number)
                        if begin[number] < 0:
                            push(number)
                end[here] = len(targets)
        order.reverse()
        self.nodes, self.kinds, self.order, self.number_of = nodes, kind_of, order, number_of
        self._begin, self._end, self._targets = begin, end, targets

    def below(self, number: int) -> list[int]:
        """Where the edges of a node lead, in their order; -1: nowhere."""
        return self._targets[self._begin[number] : self._end[number]]
