"""Runs the stages of a local graph with torch's engine, and keeps the gradients between them.

Gradients wait in `_crossed` at the edge where they enter, each with a label by which they are ordered: first those
that came for sends, by send id, then those that crossed from other cells. A stage gives them to the engine as its
outputs, one by one in this order, so the engine adds them up (and reduces what was broadcast, and adds sparse to dense
in the one order that there is).

A *crossing* U -> M is taken from U's grad_inputs by a hook on U for the time of the call; M is no input of the engine,
because capturing fires M's tensor hooks, on a part of the gradient. The engine has a node written in C++ compute only
what leads to an input, so where such a U gives nothing for M, it is called once more by itself, which runs no hooks. (A
Python function computes all.)

A leaf's gradient is captured, and goes to `Leaves`. Parts of it that come from several stages are added up first; in
the engine where it has tensor hooks, which must see the sum.

The graph is walked when it is first needed, and released as soon as nothing more can come. The schedule and the pass
both refer to the stages, which refer to neither: no cycle is left for the collector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad.autograd.ddp import grads_detached, has_ddp_param
from telegrad.autograd.execution.grad_capture import capture
from telegrad.autograd.execution.leaves import ALONE, ALONE_IN_TUPLE, Leaves, accumulate, add_to_context, total_of
from telegrad.autograd.execution.torch_engine import run_engine
from telegrad.autograd.graph.local_graph import Edges, Foreign, LocalGraph, Segment, Stage, by_id
from telegrad.autograd.graph.planner import plan
from telegrad.protocols.backward import UnknownSend
from telegrad.protocols.backward_messages import FINAL, ROOT, Layout

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from telegrad.autograd.context import Context, Received

__all__ = ["Stages"]

Label = tuple[int, ...]  # (0, bit of the source), or (1, rank of the cell, number of the crossing)
Waiting = tuple[list[Any], list[Tensor]]  # edges, and a gradient for each
Reports = tuple[list["Received"], list[Tensor | None]]  # recvs, and one gradient for each of their tensors

_python_function: type = torch.autograd.function.BackwardCFunction
_new: Any = tuple.__new__  # an edge without its constructor's frame
_REST = (None,) * (len(GradientEdge._fields) - 2)


class Stages:
    """The local graph of one pass, at work. One thread at a time.

    Args:
        context: The record of the forward pass at this worker. Its `gradients` are added to.

    Attributes:
        graph: The graph, from its walk to the end of its use.
        retain_graph: Whether torch is to keep the graph when it has run. Set it whenever a message has it: a mark may
            come first.
    """

    __slots__ = (
        *("_arrived", "_closed", "_context", "_crossed", "_done", "_entered", "_leaves", "_roots"),
        *("graph", "retain_graph"),
    )

    def __init__(self, context: Context) -> None:
        self._context = context
        self.graph: LocalGraph | None = None
        self.retain_graph: bool = False
        self._closed = False
        self._roots: Sequence[Tensor] = ()  # which keep the graph alive
        self._leaves: Leaves | None = None  # those that several disjoint sources reach
        self._done: set[Segment] = set()
        self._arrived = 0
        self._entered: dict[int, Waiting] = {}  # disjoint sources: bit of the source -> what came for it
        # Else: cell (None: the final stage) -> entry (id, input) -> its edge, and [(label, gradient)]
        self._crossed: dict[Segment | None, dict[tuple[int, int], tuple[Any, list[tuple[Label, Tensor]]]]] = {}

    def open(self, roots: Sequence[Tensor] = ()) -> LocalGraph:
        """Return the graph, after walking it in the first call.

        Args:
            roots: At the root of the pass, what `backward` was called with.

        Raises:
            UnknownSend: The graph has been released.
        """
        if self.graph is not None:
            return self.graph
        if self._closed:
            raise UnknownSend(-1, "had all the gradients that it can get")
        context = self._context
        with context.lock:
            sends, receipts = list(context.sends.values()), list(context.receipts.values())
        if len(sends) > 1:
            sends.sort(key=by_id)
        sources: list[tuple[int, Edges]] = []
        if roots:
            self._roots = roots
            entries: list[Any] = []
            for root in roots:
                node = root.grad_fn
                entries.append(root if node is None else _new(GradientEdge, (node, root.output_nr, *_REST)))
            sources.append((ROOT, entries))
        for sent in sends:
            edges: Edges = sent.edges
            for edge in edges:
                if isinstance(edge, Tensor) and not edge.requires_grad:  # a leaf that did when it was sent
                    edges = [None if isinstance(e, Tensor) and not e.requires_grad else e for e in edges]
                    break
            sources.append((sent.id, edges))
        graph = LocalGraph(sources, receipts)
        if not graph.is_disjoint:
            plan(graph)
        if graph.shared:
            self._leaves = Leaves(context, graph.shared)
        self.graph = graph
        return graph

    def close(self) -> None:
        """Release the graph: nothing more can come."""
        self._closed = True
        self.graph = None
        self._roots = ()
        self._entered.clear()
        self._crossed.clear()

    def layout(self) -> Layout:
        """Return the graph as the schedule needs it."""
        return self.open().layout()

    def pending(self) -> bool:
        """Return whether gradients wait that only the final stage takes up."""
        graph = self.graph
        if graph is None:
            return False
        if graph.is_disjoint:
            waiting = self._leaves is not None and self._leaves.waiting
            return waiting or (len(graph.bits) == 1 and bool(self._entered))
        return None in self._crossed

    def add(self, source: int, grads: Sequence[Tensor | None], place: int = 0) -> int:
        """Take the gradients of a source, one for each of its edges.

        Args:
            source: Its id.
            grads: The gradients.
            place: Where those of the source begin in `grads`.

        Returns:
            The place after them.

        Raises:
            UnknownSend: There is no such source, or it had its gradient already.
        """
        graph = self.graph or self.open()
        edges = graph.sources.get(source)
        if edges is None:
            raise UnknownSend(source, "sent no tensors from here, or did so after backward began")
        bit = graph.bits[source]
        if self._arrived >> bit & 1:
            raise UnknownSend(source, "had its gradient already")
        self._arrived |= 1 << bit
        outputs: list[Any] = []
        given: list[Tensor] = []
        for edge in edges:
            grad = grads[place]
            place += 1
            if edge is not None and grad is not None:
                outputs.append(edge)
                given.append(grad)
        if graph.is_disjoint:
            self._entered[bit] = outputs, given
        else:
            for edge, grad in zip(outputs, given, strict=True):
                self._put(edge, (0, bit), grad)
        return place

    def run(self, group: int) -> Reports:
        """Run the stage of a group, or FINAL, and return what its recvs report: an undefined gradient is None.

        Raises what hooks and functions raise, and Foreign.
        """
        graph = self.graph or self.open()
        if graph.foreign and any(mask & self._arrived for _, mask in graph.foreign):
            raise Foreign(
                "The gradient reaches a tensor that was received in another autograd context. Gradients do not"
                " flow from one context into another: detach() the tensor, or fetch it again inside this context."
            )
        if not graph.is_disjoint:
            stage = graph.stage(group, self._done)
            self._done.update(stage.cells)
            outputs, grads = self._take(stage.cells or (None,))
            if group == FINAL and has_ddp_param(stage.whole):
                return self._run_reduced(stage, outputs, grads)
        elif group == FINAL and len(graph.bits) > 1:
            if self._leaves is not None:
                self._leaves.finish()
            return [], []
        else:
            stage = graph.final if group == FINAL else graph.stages[group]
            outputs, grads = self._entered.pop(stage.rank)
        inputs: list[Any] = []
        for received in stage.recvs:
            node = received.node
            for place in range(received.outputs):
                inputs.append(_new(GradientEdge, (node, place, *_REST)))
        reported = len(inputs)
        if not stage.crossings:
            for edge in outputs:
                if type(edge) is GradientEdge or getattr(edge, "_backward_hooks", None):
                    break
            else:  # gradients that wait at leaves need no engine
                self._land_directly(stage, outputs, grads)
                return stage.recvs, [None] * reported
        inputs += stage.whole
        inputs += stage.parts
        if stage.crossings:
            found = self._run_crossing(stage, outputs, grads, inputs)
        else:
            found = self._engine_call(outputs, grads, inputs, self.retain_graph)
        del outputs, grads, inputs
        place = reported
        for leaf in stage.whole:
            grad = found[place]
            place += 1
            if grad is not None:
                alone = getrefcount(grad) <= ALONE_IN_TUPLE  # but for `found`
                accumulate(self._context, leaf, grad, alone)
        for leaf in stage.parts:
            grad = found[place]
            if self._leaves is not None:
                self._leaves.part(leaf, stage.rank, grad)
            elif grad is not None:
                self._put(leaf, (1, stage.rank, -1, place), grad)
            place += 1
        return stage.recvs, list(found[:reported])

    # ---- one engine call -------------------------------------------------------------------------------------------

    def _engine_call(
        self, outputs: list[Any], grads: list[Tensor], inputs: list[Any], retain_graph: bool
    ) -> tuple[Tensor | None, ...]:
        """Run one call of torch's engine."""
        if not outputs or not inputs:  # all gradients undefined; or nothing wants one
            return (None,) * len(inputs)
        return run_engine(tuple(outputs), tuple(grads), tuple(inputs), retain_graph)

    def _run_crossing(
        self, stage: Stage, outputs: list[Any], grads: list[Tensor], inputs: list[Any]
    ) -> tuple[Tensor | None, ...]:
        """Run the engine call of a stage with crossings, and put their gradients where they lead."""
        seen: dict[Node, tuple[Any, Any]] = {}
        nodes = dict.fromkeys(crossing.node for crossing in stage.crossings)
        again = any(not isinstance(node, _python_function) for node in nodes)
        hooks = [node.register_hook(partial(_see, seen, node)) for node in nodes]
        try:
            found = self._engine_call(outputs, grads, inputs, self.retain_graph or again)
        finally:
            for hook in hooks:
                hook.remove()
        assert self.graph is not None
        cell_of = self.graph.cell_of
        repeated: dict[Node, Any] = {}
        for number, (node, output, target, place) in enumerate(stage.crossings):
            if node not in seen:
                continue  # no gradient has reached it
            grad_inputs, grad_outputs = seen[node]
            grad = grad_inputs[output]
            if grad is None and not isinstance(node, _python_function):
                if node not in repeated:
                    with torch.no_grad():
                        result = node(*grad_outputs)  # type: ignore[operator]
                    repeated[node] = result if isinstance(result, tuple) else (result,)
                grad = repeated[node][output]
                if grad is not None and isinstance(target, Tensor):  # else the engine will do it
                    grad = grad.sum_to_size(target.shape).to(target.dtype)
            if grad is not None:
                edge = target if isinstance(target, Tensor) else GradientEdge(target, place)
                self._put(edge, (1, cell_of[node].rank, number), grad)
        return found

    def _put(self, edge: Any, label: Label, grad: Tensor) -> None:
        """Let a gradient wait for the cell of its node."""
        assert self.graph is not None
        if isinstance(edge, Tensor):
            cell, entry = None, (id(edge), 0)
        else:
            cell, entry = self.graph.cell_of.get(edge.node), (id(edge.node), edge.output_nr)
        self._crossed.setdefault(cell, {}).setdefault(entry, (edge, []))[1].append((label, grad))

    def _take(self, cells: Sequence[Segment | None]) -> Waiting:
        """Return what waits for some cells, in the order in which it is to be added up."""
        outputs: list[Any] = []
        grads: list[Tensor] = []
        for cell in cells:
            for edge, parts in self._crossed.pop(cell, {}).values():
                parts.sort(key=_label)
                outputs += [edge] * len(parts)
                grads += [grad for _, grad in parts]
        return outputs, grads

    def _run_reduced(self, stage: Stage, outputs: list[Any], grads: list[Tensor]) -> Reports:
        """Run the final stage where a reducer of DDP waits for some leaf: AccumulateGrad and the recvs' nodes run."""
        nodes = [received.node for received in stage.recvs]
        with capture(nodes) as call:
            if outputs:
                inputs: list[Any] = [call.leaf, *stage.whole, *[GradientEdge(node, 0) for node in nodes]]
                with grads_detached(stage.whole, partial(add_to_context, self._context)):
                    torch.autograd.backward(
                        [call.leaf, *outputs], [call.gradient, *grads], retain_graph=self.retain_graph, inputs=inputs
                    )
            tensors: list[Tensor | None] = []
            for received in stage.recvs:
                tensors += call.captured[received.node] or (None,) * received.outputs
            return stage.recvs, tensors

    def _land_directly(self, stage: Stage, outputs: list[Any], grads: list[Tensor]) -> None:
        """Land gradients that wait at leaves. Empties `grads`: nothing here holds a gradient that the context gets."""
        assert self.graph is not None
        shared = self.graph.shared
        storages: set[int] = set()
        by_leaf: dict[int, tuple[Tensor, list[Tensor]]] = {}
        grads.reverse()
        for leaf in outputs:
            if id(leaf) in by_leaf:
                by_leaf[id(leaf)][1].append(grads.pop())
            else:
                by_leaf[id(leaf)] = leaf, [grads.pop()]
        several = len(outputs) > 1
        given: dict[int, Tensor] = {}
        for leaf, parts in by_leaf.values():
            if len(parts) > 1:
                grad, alone = total_of(parts), True
            else:
                grad = parts.pop()
                alone = getrefcount(grad) <= ALONE
                if alone and several and grad.layout is torch.strided:  # tensors of one message may share their memory
                    storage = grad.untyped_storage().data_ptr()
                    alone = storage not in storages
                    storages.add(storage)
            if id(leaf) in shared:
                given[id(leaf)] = grad
            else:
                accumulate(self._context, leaf, grad, alone)
        if self._leaves is not None:
            for leaf in stage.parts:
                self._leaves.part(leaf, stage.rank, given.get(id(leaf)))


def _see(seen: dict[Any, tuple[Any, Any]], node: Any, grad_inputs: Any, grad_outputs: Any) -> None:
    seen[node] = (grad_inputs, grad_outputs)


def _label(item: tuple[Label, Tensor]) -> Label:
    return item[0]
