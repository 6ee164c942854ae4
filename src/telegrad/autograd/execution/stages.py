"""Runs the stages of a local graph, and keeps the gradients between them.

Gradients wait at the edge where they enter (`_pending`), each with a label that gives its place in the sum: first those
that arrived for sends, by send id, then those of cut edges from other graph segments. A stage passes them to the engine
as roots of the call, one by one in this order. The engine adds them, reduces broadcast dimensions, and adds dense
before sparse, the only order that it supports.

The gradient of a *cut edge* U -> M is read from U's grad_inputs by a hook on U during the call. M is no input of the
engine, because capturing it runs M's tensor hooks on part of the gradient. In the engine, a node written in C++
computes only gradients that lead to an input. If such a U therefore computes none for M, it is called once more outside
of the engine, which runs no hooks. (A Python function computes all its gradients.)

A leaf's gradient is captured and goes to `SharedLeaves` or the context. Partial gradients of several stages are added
first; the engine adds them if the leaf has tensor hooks, which must get the sum.

The graph is walked when it is first needed, and released as soon as no more gradients can arrive. The schedule and the
pass both refer to the stages, which refer to neither: no reference cycle is left to the garbage collector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad.autograd.context import Context
from telegrad.autograd.ddp import grads_from_context, has_ddp_param
from telegrad.autograd.execution.grad_capture import Captured, EngineCall
from telegrad.autograd.execution.leaves import (
    ELEMENT_REFCOUNT,
    VARIABLE_REFCOUNT,
    SharedLeaves,
    accumulate,
    add_outer,
    add_to_context,
    edges_of_outer,
    sum_of,
)
from telegrad.autograd.execution.torch_engine import run_engine
from telegrad.autograd.graph.local_graph import ForeignRecvError, GraphSegment, LocalGraph, Stage
from telegrad.autograd.graph.planner import plan
from telegrad.protocols.backward import UnknownSend
from telegrad.protocols.backward_messages import FINAL, Layout

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from telegrad.autograd.context import Entry, Received
    from telegrad.autograd.execution.wanted import Wanted

__all__ = ["Reports", "StageRunner"]

Label: TypeAlias = tuple[int, ...]
"""Place in a sum: (0, id of the source), or (1, rank of the segment, number of the cut edge)."""

Roots: TypeAlias = tuple[list["Entry"], list[Tensor]]
"""Roots of an engine call: entries, and a gradient for each."""

Reports: TypeAlias = list[tuple["Received", Sequence[Tensor | None]]]
"""Recvs, each with one gradient for each of its tensors."""

NodeGradients: TypeAlias = tuple[Sequence[Tensor | None], Sequence[Tensor | None]]
"""The grad_inputs and grad_outputs of a node, as its hook gets them."""

_python_function: type = torch.autograd.function.BackwardCFunction


class StageRunner:
    """Runs the stages of one pass at one worker. One thread at a time.

    Args:
        context: The record of the forward pass at this worker. Its `gradients` are added to; in a plain context,
            `.grad` of the leaves.

    Attributes:
        graph: The graph, from its walk until it is released.
        retain_graph: Whether torch keeps the graph after it has run. To be set whenever a message has it: a mark may
            arrive first.
        wanted: At the root of `torch.autograd.grad`: the gradients to return.
    """

    __slots__ = (
        *("_arrived", "_bare_sources", "_closed", "_context", "_done", "_gradients_in", "_pending", "_roots"),
        *("_shared_leaves", "_source_grads", "graph", "retain_graph", "wanted"),
    )

    is_alone: Final = False  # only in a plain context

    def __init__(self, context: Context) -> None:
        self._context = context
        self._gradients_in: Context | None = None if context.is_plain else context  # None: in `.grad`
        self.graph: LocalGraph | None = None
        self.retain_graph: bool = False
        self.wanted: Wanted | None = None
        self._closed = False
        self._roots: Sequence[Entry] = ()  # they keep the graph alive
        self._shared_leaves: SharedLeaves | None = None  # leaves that several disjoint sources reach
        self._done: set[GraphSegment] = set()
        self._bare_sources = (
            0  # by bit; of leaves without tensor hooks, with gradients that the engine need not convert
        )
        self._arrived = 0  # sources with gradients, by bit
        self._source_grads: dict[int, Roots] = {}  # disjoint sources: bit of the source -> its gradients
        # Sources that meet: segment (None: final stage) -> (id of the node, input) -> entry, and [(label, gradient)]
        self._pending: dict[GraphSegment | None, dict[tuple[int, int], tuple[Entry, list[tuple[Label, Tensor]]]]] = {}

    def discard_leaves(self, wanted: Wanted | None = None) -> None:
        """Leave `.grad` of leaves as it is: a pass of `torch.autograd.grad`.

        Args:
            wanted: At the root, the gradients to return.
        """
        if self.wanted is None:
            self._gradients_in = Context(0) if wanted is None else wanted.leaves
            self.wanted = wanted

    def open(
        self,
        roots: Sequence[Entry] = (),
        sends: Sequence[int] = (),
        alone_with: int | None = None,
        graph: LocalGraph | None = None,
    ) -> LocalGraph:
        """Return the graph, after walking it in the first call.

        Args:
            roots: At the root of the pass, the arguments of `backward`.
            sends, alone_with: Not used: the graph has all sends of the context (see `PlainStages`).
            graph: In the first call: the graph, if it has been walked.

        Raises:
            UnknownSend: The graph has been released.
        """
        if self.graph is not None:
            return self.graph
        if self._closed:
            raise UnknownSend(-1, "already received all its gradients")
        if graph is None:
            context = self._context
            with context.lock:
                records, receipts = list(context.sends.values()), list(context.receipts.values())
            graph = LocalGraph(roots, records, receipts)
        if not graph.is_disjoint:
            plan(graph)
        if graph.shared:
            self._shared_leaves = SharedLeaves(self._context, graph.shared)
        self._roots = roots
        self.graph = graph
        return graph

    @property
    def holds_graph(self) -> bool:
        """Whether the graph has not been released."""
        return self.graph is not None

    def close(self) -> None:
        """Release the graph: no more gradients can arrive."""
        self._closed = True
        self.graph = None
        self._roots = ()
        self._source_grads.clear()
        self._pending.clear()

    def layout(self, _: Sequence[int] = ()) -> Layout:
        """Return the graph as the schedule needs it."""
        return self.open().layout()

    def open_ends(self, _: Sequence[int]) -> dict[int, int] | None:
        """Return the stages of sends; at a root on the fast path, they lead to leaves."""
        assert self.graph is not None
        return self.graph.bits

    def pending(self) -> bool:
        """Return whether gradients wait for the final stage."""
        graph = self.graph
        if graph is None:
            return False
        if graph.is_disjoint:
            waiting = self._shared_leaves is not None and self._shared_leaves.waiting
            return waiting or (len(graph.bits) == 1 and bool(self._source_grads))
        return None in self._pending

    def add(self, source: int, grads: Iterable[Tensor | None]) -> None:
        """Add the gradients of a source.

        Args:
            source: Its id.
            grads: Begins with one for each of its edges; an iterator is then at those of the next source.

        Raises:
            UnknownSend: There is no such source, or it has its gradients already.
            WorkerLost: A loss has dropped the record of the source.
        """
        graph = self.graph or self.open()
        edges = graph.sources.get(source)
        if edges is None:
            raise self._context.why_unknown(source)
        bit = graph.bits[source]
        if self._arrived >> bit & 1:
            raise UnknownSend(source, "already received its gradient")
        self._arrived |= 1 << bit
        outputs: list[Entry] = []
        given: list[Tensor] = []
        is_bare = True
        remaining = iter(grads)
        for edge in edges:
            grad = next(remaining)
            if edge is None:
                continue
            if not isinstance(edge, Tensor) or getattr(edge, "_backward_hooks", None):
                is_bare = False
            elif grad is not None:  # that of a communication hook may be of another shape or type
                is_bare &= grad.dtype is edge.dtype and grad.layout is edge.layout and grad.shape == edge.shape
            if grad is not None:
                outputs.append(edge)
                given.append(grad)
        if graph.is_disjoint:
            self._source_grads[bit] = outputs, given
            self._bare_sources |= is_bare << bit
        else:
            for edge, grad in zip(outputs, given, strict=True):
                self._add_pending(edge, (0, source), grad)

    def run(self, group: int) -> Reports:
        """Run the stage of a group, or FINAL, and return the gradients of its recvs.

        An undefined gradient is None. Errors of hooks and functions are passed on.

        Raises:
            ForeignRecvError: A gradient reaches a tensor of another context.
        """
        graph = self.graph or self.open()
        if graph.foreign and any(mask & self._arrived for _, mask in graph.foreign):
            raise ForeignRecvError(
                "The gradient reaches a tensor that was received in another autograd context. Gradients do not"
                " flow from one context into another: detach() the tensor, or fetch it again inside this context."
            )
        if not graph.is_disjoint:
            return self._run_cells(graph, group)
        if group == FINAL and len(graph.bits) > 1:  # each source is a stage of its own
            if self._shared_leaves is not None:
                self._shared_leaves.finish()
            return []
        stage = graph.final if group == FINAL else graph.stages[group]
        outputs, grads = self._source_grads.pop(stage.rank)
        if self._gradients_in is None:
            return self._run_accumulating(stage, outputs, grads)
        if self._bare_sources >> stage.rank & 1:
            self._accumulate_directly(stage, outputs, grads)
            return []
        return self._run_capturing(stage, outputs, grads)

    def _run_cells(self, graph: LocalGraph, group: int) -> Reports:
        """Run the stage of a group, or FINAL, of sources that meet."""
        stage = graph.stage(group, self._done)
        self._done.update(stage.segments)
        outputs, grads = self._take_pending(stage.segments or (None,))
        if self._gradients_in is None and not stage.cut_edges and not stage.partial_leaves:
            return self._run_accumulating(stage, outputs, grads)
        if self._gradients_in is self._context and group == FINAL and has_ddp_param(stage.complete_leaves):
            return self._run_for_ddp(stage, outputs, grads)
        return self._run_capturing(stage, outputs, grads)

    # ---- one engine call -------------------------------------------------------------------------------------------

    def _run_capturing(self, stage: Stage, outputs: list[Entry], grads: list[Tensor]) -> Reports:
        """Run a stage with its ends as inputs of the engine: it returns gradients."""
        inputs: list[Entry] = []
        for received in stage.recvs:
            for output in range(received.outputs):
                inputs.append(GradientEdge(received.node, output))
        inputs += stage.complete_leaves
        inputs += stage.partial_leaves
        for node in stage.outer:
            inputs += edges_of_outer(node)
        wanted: Mapping[int, GradientEdge] = {}
        if self.wanted is not None and self.graph is not None:
            wanted = self.wanted.edges_in(self.graph, stage)
            inputs += wanted.values()
        if not outputs or not inputs:  # all gradients are undefined, or none is needed
            found: tuple[Tensor | None, ...] = (None,) * len(inputs)
        elif stage.cut_edges:
            found = self._run_with_cut_edges(stage, outputs, grads, inputs)
        else:
            found = run_engine(tuple(outputs), tuple(grads), tuple(inputs), self.retain_graph, False)
        grads.clear()  # only `found` refers to those that the engine has passed on
        return self._distribute(stage, wanted, iter(found))

    def _distribute(self, stage: Stage, wanted: Iterable[int], found: Iterator[Tensor | None]) -> Reports:
        """Pass on the gradients of an engine call's inputs; return those of recvs."""
        reports: Reports = []
        for received in stage.recvs:
            reports.append((received, list(islice(found, received.outputs))))
        for leaf in stage.complete_leaves:
            grad = next(found)
            if grad is not None:
                # Only the engine's result and `grad` refer to it.
                uniquely_owned = getrefcount(grad) <= ELEMENT_REFCOUNT
                accumulate(self._gradients_in, leaf, grad, uniquely_owned, self._gradients_in is self._context)
        for leaf in stage.partial_leaves:
            grad = next(found)
            if self._shared_leaves is not None:
                self._shared_leaves.add(leaf, stage.rank, grad)
            elif grad is not None:
                self._add_pending(leaf, (1, stage.rank, -1), grad)
        for node in stage.outer:
            add_outer(self._context, node, list(islice(found, len(edges_of_outer(node)))))
        for number in wanted:
            assert self.wanted is not None
            self.wanted.add(number, next(found))
        return reports

    def _run_with_cut_edges(
        self, stage: Stage, outputs: list[Entry], grads: list[Tensor], inputs: list[Entry]
    ) -> tuple[Tensor | None, ...]:
        """Run the engine, and keep the gradients of a stage's cut edges."""
        seen: dict[Node, NodeGradients] = {}
        nodes = dict.fromkeys(edge.node for edge in stage.cut_edges)
        may_repeat = any(not isinstance(node, _python_function) for node in nodes)
        hooks = [node.register_hook(partial(_record, seen, node)) for node in nodes]
        try:
            retain_graph = self.retain_graph or may_repeat
            found = run_engine(tuple(outputs), tuple(grads), tuple(inputs), retain_graph, False)
        finally:
            for hook in hooks:
                hook.remove()
        assert self.graph is not None
        segment_of = self.graph.segment_of
        repeated: dict[Node, Sequence[Tensor | None]] = {}
        for number, (node, output, target, place) in enumerate(stage.cut_edges):
            if node not in seen:
                continue  # no gradient has reached the node
            grad_inputs, grad_outputs = seen[node]
            grad = grad_inputs[output]
            if grad is None and not isinstance(node, _python_function):
                if node not in repeated:
                    with torch.no_grad():
                        result = node(*grad_outputs)  # type: ignore[operator]
                    repeated[node] = result if isinstance(result, tuple) else (result,)
                grad = repeated[node][output]
                if grad is not None and isinstance(target, Tensor):  # for other targets the engine does it
                    grad = grad.sum_to_size(target.shape).to(target.dtype)
            if grad is not None:
                edge = target if isinstance(target, Tensor) else GradientEdge(target, place)
                self._add_pending(edge, (1, segment_of[node].rank, number), grad)
        return found

    def _add_pending(self, entry: Entry, label: Label, grad: Tensor) -> None:
        """Keep a gradient until the stage of its node runs."""
        assert self.graph is not None
        if isinstance(entry, Tensor):
            segment, key = None, (id(entry), 0)
        else:
            segment, key = self.graph.segment_of.get(entry.node), (id(entry.node), entry.output_nr)
        self._pending.setdefault(segment, {}).setdefault(key, (entry, []))[1].append((label, grad))

    def _take_pending(self, segments: Sequence[GraphSegment | None]) -> Roots:
        """Remove and return the gradients for some segments, in the order of their sum."""
        outputs: list[Entry] = []
        grads: list[Tensor] = []
        for segment in segments:
            for edge, parts in self._pending.pop(segment, {}).values():
                parts.sort(key=itemgetter(0))
                outputs += [edge] * len(parts)
                grads += [grad for _, grad in parts]
        return outputs, grads

    def _run_for_ddp(self, stage: Stage, outputs: list[Entry], grads: list[Tensor]) -> Reports:
        """Run the final stage including AccumulateGrad and recv nodes, for DDP's reducer."""
        nodes = [received.node for received in stage.recvs] + stage.outer
        with EngineCall(nodes) as call:
            if outputs:
                recvs = [GradientEdge(node, 0) for node in nodes]
                inputs: list[Entry] = [call.leaf, *stage.complete_leaves, *recvs]
                with grads_from_context(self._context, stage.complete_leaves, add_to_context):
                    roots, given = (call.leaf, *outputs), (call.gradient, *grads)
                    run_engine(roots, given, tuple(inputs), self.retain_graph, True)
            for node in stage.outer:
                add_outer(self._context, node, call.captured[node] or ())
        return _reports_of(stage, call.captured)

    def _run_accumulating(self, stage: Stage, outputs: list[Entry], grads: list[Tensor]) -> Reports:
        """Run a stage like a local backward pass: it adds to `.grad`, with all hooks."""
        if not stage.recvs:
            if outputs:
                run_engine(tuple(outputs), tuple(grads), (), self.retain_graph, True)
            return []
        with EngineCall([received.node for received in stage.recvs]) as call:
            if outputs:
                run_engine((call.leaf, *outputs), (call.gradient, *grads), (), self.retain_graph, True)
        return _reports_of(stage, call.captured)

    def _accumulate_directly(self, stage: Stage, outputs: list[Entry], grads: list[Tensor]) -> None:
        """Accumulate gradients of leaves without the engine.

        Empties `grads`, so that only the context holds its gradients.
        """
        assert self.graph is not None
        shared = self.graph.shared
        storages: set[int] = set()
        by_leaf: dict[int, tuple[Tensor, list[Tensor]]] = {}
        grads.reverse()
        for leaf in outputs:
            assert isinstance(leaf, Tensor)
            if id(leaf) in by_leaf:
                by_leaf[id(leaf)][1].append(grads.pop())
            else:
                by_leaf[id(leaf)] = leaf, [grads.pop()]
        partial_grads: dict[int, Tensor] = {}
        for leaf, parts in by_leaf.values():
            if len(parts) > 1:
                grad, uniquely_owned = sum_of(parts), True
            else:
                grad = parts.pop()
                uniquely_owned = getrefcount(grad) <= VARIABLE_REFCOUNT
                if uniquely_owned and len(outputs) > 1 and grad.layout is torch.strided:
                    storage = grad.untyped_storage().data_ptr()  # tensors of one message may share their memory
                    uniquely_owned = storage not in storages
                    storages.add(storage)
            if id(leaf) in shared:
                partial_grads[id(leaf)] = grad
            else:
                accumulate(self._gradients_in, leaf, grad, uniquely_owned, self._gradients_in is self._context)
        if self._shared_leaves is not None:
            for leaf in stage.partial_leaves:
                self._shared_leaves.add(leaf, stage.rank, partial_grads.get(id(leaf)))


def _reports_of(stage: Stage, captured: Captured) -> Reports:
    """Return the gradients of a stage's recvs that an engine call has captured."""
    return [(received, captured[received.node] or (None,) * received.outputs) for received in stage.recvs]


def _record(
    seen: dict[Node, NodeGradients],
    node: Node,
    grad_inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
) -> None:
    seen[node] = (grad_inputs, grad_outputs)
