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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad.autograd.ddp import any_reduced, aside
from telegrad.autograd.engine import run_engine, run_to_the_ends
from telegrad.autograd.graph import ACCUMULATE, Cell, Foreign, LocalGraph, Stage, has_hooks
from telegrad.autograd.leaves import ALONE, ALONE_IN_TUPLE, Leaves, references, total_of
from telegrad.autograd.taking import taking
from telegrad.protocols.backward import UnknownSend
from telegrad.protocols.backward_messages import FINAL

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from telegrad.autograd.context import Context, Received

__all__ = ["Stages"]

Label = tuple[int, ...]  # (0, bit of the source), or (1, rank of the cell, number of the crossing)
Report = tuple["Received", Sequence[Tensor | None]]
Waiting = list[tuple[GradientEdge, Tensor]]

_python_function: type = torch.autograd.function.BackwardCFunction


class Stages:
    """The local graph of one pass at work. One thread at a time."""

    __slots__ = ("_arrived", "_crossed", "_done", "_entered", "_leaves", "graph", "retain_graph")

    def __init__(self, context: Context, graph: LocalGraph) -> None:
        self.graph: LocalGraph = graph
        self.retain_graph: bool = False
        self._leaves = Leaves(context, graph.shared)
        self._done: set[Cell] = set()
        self._arrived = 0
        self._entered: dict[int, Waiting] = {}  # in a forest: bit of the source -> what came for it
        # Else: cell (None: the final stage) -> edge -> [(label, gradient)]
        self._crossed: dict[Cell | None, dict[tuple[Node, int], list[tuple[Label, Tensor]]]] = {}

    def add(self, source: int, grads: Sequence[Tensor | None], place: int = 0) -> int:
        """The gradients of a source have arrived, one for each of its edges, at `place` in `grads`. Returns the place
        after them. Raises UnknownSend."""
        graph = self.graph
        edges = graph.sources.get(source)
        if edges is None:
            raise UnknownSend(source, "sent no tensors from here, or did so after backward began")
        bit = graph.bits[source]
        if self._arrived >> bit & 1:
            raise UnknownSend(source, "had its gradient already")
        self._arrived |= 1 << bit
        found: Waiting = []
        for edge in edges:
            grad = grads[place]
            place += 1
            if edge is not None and grad is not None:
                found.append((edge, grad))
        if graph.is_forest:
            self._entered[bit] = found
        else:
            for edge, grad in found:
                self._put(edge.node, edge.output_nr, (0, bit), grad)
        return place

    def skip(self, group: int) -> None:
        """The stage of a group of a forest, or FINAL, has run elsewhere, and what its recvs report is known there."""
        assert self.graph.is_forest
        self._entered.pop(self.graph.stage(group, self._done).rank)

    def pending(self) -> bool:
        """Whether gradients wait that only the final stage takes up."""
        graph = self.graph
        if graph.is_forest:
            return self._leaves.waiting or (len(graph.bits) == 1 and bool(self._entered))
        return None in self._crossed

    def run(self, group: int) -> list[Report]:
        """Runs the stage of a group, or FINAL, and returns what its recvs report: an undefined gradient is None.

        Raises what hooks and functions raise, and Foreign.
        """
        graph = self.graph
        if graph.foreign and any(mask & self._arrived for _, mask in graph.foreign):
            raise Foreign(
                "The gradient reaches a tensor that was received in another autograd context. Gradients do not"
                " flow from one context into another: detach() the tensor, or fetch it again inside this context."
            )
        stage = graph.stage(group, self._done)
        if stage.cells:
            self._done.update(stage.cells)
            waiting = [item for cell in stage.cells for item in self._take(cell)]
        elif group == FINAL and graph.is_forest and len(graph.bits) > 1:
            self._leaves.finish()
            return []
        else:
            waiting = self._entered.pop(stage.rank) if graph.is_forest else self._take(None)
            if graph.only_recvs and graph.only_recvs >> stage.rank & 1:
                return self._run_to_the_ends(stage, waiting)
            if group == FINAL and any_reduced(stage.whole):
                return self._run_reduced(stage, waiting)
        inputs: list[Any] = [
            GradientEdge(received.node, place) for received in stage.recvs for place in range(received.outputs)
        ]
        recvs = len(inputs)
        if not stage.crossings and _only_plain_leaves(waiting):
            self._land_directly(stage, waiting)
            return _reports(stage.recvs, (None,) * recvs)
        whole = [leaf.variable for leaf in stage.whole]  # type: ignore[attr-defined]
        inputs += whole
        inputs += [leaf.variable for leaf in stage.parts]  # type: ignore[attr-defined]
        outputs = tuple([edge for edge, _ in waiting])
        grads = tuple([grad for _, grad in waiting])
        del waiting
        if stage.crossings:
            found = self._run_crossing(stage, outputs, grads, inputs)
        else:
            found = self._engine_call(outputs, grads, inputs, self.retain_graph)
        del outputs, grads, inputs
        reports = _reports(stage.recvs, found)
        if whole:
            land = self._leaves.land
            for place in range(len(stage.whole)):
                grad = found[recvs + place]
                if grad is not None:
                    alone = references(grad) <= ALONE_IN_TUPLE  # but for `found`
                    land(whole[place], grad, alone)
        for number, (leaf, grad) in enumerate(zip(stage.parts, found[recvs + len(whole) :], strict=True)):
            if graph.is_forest:
                self._leaves.part(leaf, stage.rank, grad)
            elif grad is not None:
                self._put(leaf, 0, (1, stage.rank, -1, number), grad)
        return reports

    # ---- one engine call -------------------------------------------------------------------------------------------

    def _engine_call(
        self, outputs: tuple[GradientEdge, ...], grads: tuple[Tensor, ...], inputs: list[Any], retain_graph: bool
    ) -> tuple[Tensor | None, ...]:
        if not outputs or not inputs:  # all gradients undefined; or nothing wants one
            return (None,) * len(inputs)
        return run_engine(outputs, grads, tuple(inputs), retain_graph)

    def _run_crossing(
        self, stage: Stage, outputs: tuple[GradientEdge, ...], grads: tuple[Tensor, ...], inputs: list[Any]
    ) -> tuple[Tensor | None, ...]:
        """One engine call of a stage with crossings, whose gradients are put where they lead."""
        seen: dict[Node, tuple[Any, Any]] = {}
        nodes = dict.fromkeys(crossing.node for crossing in stage.crossings)
        again = any(not isinstance(node, _python_function) for node in nodes)
        hooks = [node.register_hook(partial(_see, seen, node)) for node in nodes]
        try:
            found = self._engine_call(outputs, grads, inputs, self.retain_graph or again)
        finally:
            for hook in hooks:
                hook.remove()
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
                if grad is not None and type(target) is ACCUMULATE:  # else the engine will do it
                    leaf: Tensor = target.variable  # type: ignore[attr-defined]
                    grad = grad.sum_to_size(leaf.shape).to(leaf.dtype)
            if grad is not None:
                self._put(target, place, (1, self.graph.cell_of[node].rank, number), grad)
        return found

    def _put(self, node: Node, place: int, label: Label, grad: Tensor) -> None:
        """Lets a gradient wait for the cell of its node."""
        cell = self.graph.cell_of.get(node)
        self._crossed.setdefault(cell, {}).setdefault((node, place), []).append((label, grad))

    def _take(self, cell: Cell | None) -> Waiting:
        """What waits for a cell, in the order in which it is to be added up."""
        found: Waiting = []
        for (node, place), parts in self._crossed.pop(cell, {}).items():
            parts.sort(key=_label)
            edge = GradientEdge(node, place)
            found += [(edge, grad) for _, grad in parts]
        return found

    def _run_to_the_ends(self, stage: Stage, waiting: Waiting) -> list[Report]:
        """The stage of a source that leads to recvs alone, past many nodes."""
        outputs, grads = [edge for edge, _ in waiting], [grad for _, grad in waiting]
        waiting.clear()
        return _taken(stage.recvs, run_to_the_ends(stage.recvs, outputs, grads, self.retain_graph))

    def _run_reduced(self, stage: Stage, waiting: Waiting) -> list[Report]:
        """The final stage where DDP's reducer waits for some leaf: AccumulateGrad runs, and so do the recvs' nodes."""
        leaves: list[Tensor] = [leaf.variable for leaf in stage.whole]  # type: ignore[attr-defined]
        with taking(stage.recvs) as call:
            if waiting:
                outputs: list[Any] = [call.leaf, *[edge for edge, _ in waiting]]
                grads = [call.gradient, *[grad for _, grad in waiting]]
                inputs: list[Any] = [call.leaf, *leaves, *[GradientEdge(received.node, 0) for received in stage.recvs]]
                with aside(leaves, self._leaves.add):
                    torch.autograd.backward(outputs, grads, retain_graph=self.retain_graph, inputs=inputs)
            return _taken(stage.recvs, call.found)

    def _land_directly(self, stage: Stage, waiting: Waiting) -> None:
        """Gradients that wait at leaves need no engine."""
        leaves = self._leaves
        storages: set[int] = set()
        given: dict[Node, Tensor] = {}
        by_leaf: dict[Node, list[Tensor]] = {}
        waiting.reverse()
        while waiting:
            edge, grad = waiting.pop()
            by_leaf.setdefault(edge.node, []).append(grad)
            del grad
        for node, parts in by_leaf.items():
            if len(parts) > 1:
                grad, alone = total_of(parts), True
            else:
                grad = parts.pop()
                alone = references(grad) <= ALONE
                if alone and len(by_leaf) > 1 and grad.layout is torch.strided:
                    # Tensors of one message may share their memory.
                    storage = grad.untyped_storage().data_ptr()
                    alone = storage not in storages
                    storages.add(storage)
            if node in self.graph.shared:
                given[node] = grad
            else:
                leaves.land(node.variable, grad, alone)  # type: ignore[attr-defined]
        if self.graph.is_forest:
            for node in stage.parts:
                leaves.part(node, stage.rank, given.get(node))


def _see(seen: dict[Any, tuple[Any, Any]], node: Any, grad_inputs: Any, grad_outputs: Any) -> None:
    seen[node] = (grad_inputs, grad_outputs)


def _label(item: tuple[Label, Tensor]) -> Label:
    return item[0]


def _only_plain_leaves(waiting: Waiting) -> bool:
    return all(type(edge.node) is ACCUMULATE and not has_hooks(edge.node) for edge, _ in waiting)


def _taken(recvs: Iterable[Received], found: Mapping[Any, Sequence[Tensor | None] | None]) -> list[Report]:
    return [(received, found[received.node] or (None,) * received.outputs) for received in recvs]


def _reports(recvs: Iterable[Received], found: Sequence[Tensor | None]) -> list[Report]:
    reports: list[Report] = []
    place = 0
    for received in recvs:
        reports.append((received, found[place : place + received.outputs]))
        place += received.outputs
    return reports
