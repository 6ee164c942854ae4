"""Runs the stages of a local graph with torch's engine, and keeps the gradients between them.

Gradients wait in `_pending` at the edge where they enter, each with a label by which they are ordered: first those
that came for sends, by send id, then those that crossed from other cells. A stage gives them to the engine as its
outputs, one by one in this order, so the engine adds them up (and reduces what was broadcast, and adds sparse to dense
in the one order that there is).

A *crossing* U -> M is taken from U's grad_inputs by a hook on U for the time of the call; M is no input of the engine,
because capturing fires M's tensor hooks, on a part of the gradient. The engine has a node written in C++ compute only
what leads to an input, so where such a U gives nothing for M, it is called once more by itself, which runs no hooks. (A
Python function computes all.)

A leaf's gradient is captured. Parts of it from several stages are added up outside the engine; with tensor hooks, in
it, once they are complete. What the final stage has gathered goes to the context.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad.autograd.ddp import accumulate_beside, any_reduced, aside, has_accumulate_hooks
from telegrad.autograd.graph import ACCUMULATE, Cell, Foreign, LocalGraph, Stage, has_hooks
from telegrad.protocols.backward import UnknownSend
from telegrad.protocols.backward_messages import FINAL

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from telegrad.autograd.context import Context, Received

__all__ = ["Stages"]

Label = tuple[int, ...]  # (0, bit of the source), or (1, rank of the cell, number of the crossing)
Report = tuple["Received", Sequence[Tensor | None]]

_engine = getattr(torch.autograd.graph, "_engine_run_backward", None)
_python_function: type = getattr(torch._C, "_FunctionBase", torch.autograd.Function)
_use_count = getattr(Tensor, "_use_count", None)
_IN_A_TUPLE = sys.getrefcount(object()) + 2  # of a tensor that only a tuple and a loop variable hold


def _gradients(
    outputs: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Any], retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(..., allow_unused=True)` without its checks, which take as long as the engine's start."""
    if _engine is None:
        return torch.autograd.grad(outputs, inputs, grads, retain_graph=retain_graph, allow_unused=True)
    found: tuple[Tensor | None, ...] = _engine(
        tuple(outputs), tuple(grads), retain_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


class Stages:
    """The local graph of one pass at work. One thread at a time."""

    def __init__(self, context: Context, graph: LocalGraph, retain_graph: bool) -> None:
        self.graph = graph
        self._context = context
        self.retain_graph = retain_graph
        self._done: set[Cell] = set()
        self._arrived = 0
        self._bits = {source: bit for bit, source in enumerate(graph.sources)}
        # cell (None: final) -> edge -> [(label, gradient)]
        self._pending: dict[Cell | None, dict[tuple[Node, int], list[tuple[Label, Tensor]]]] = {}

    def add(self, source: int, grads: Iterable[Tensor | None]) -> None:
        """The gradients of a source have arrived, one for each of its edges."""
        bit = self._bits[source]
        self._arrived |= 1 << bit
        for edge, grad in zip(self.graph.sources[source], grads, strict=True):
            if edge is not None and grad is not None:
                self._put(edge.node, edge.output_nr, (0, bit), grad)

    def edges_of(self, source: int) -> int:
        """How many gradients a source gets. Raises UnknownSend."""
        edges = self.graph.sources.get(source)
        if edges is None:
            raise UnknownSend(source, "sent no tensors from here, or did so after backward began")
        if self._arrived >> self._bits[source] & 1:
            raise UnknownSend(source, "had its gradient already")
        return len(edges)

    def pending(self) -> bool:
        """Whether gradients wait that only the final stage takes up."""
        return bool(self._pending.get(None))

    def run(self, group: int) -> list[Report]:
        """Runs the stage of a group, or FINAL, and returns what its recvs report: an undefined gradient is None.

        Raises what hooks and functions raise, and Foreign.
        """
        for _, mask in self.graph.foreign:
            if mask & self._arrived:
                raise Foreign(
                    "The gradient reaches a tensor that was received in another autograd context. Gradients do not"
                    " flow from one context into another: detach() the tensor, or fetch it again inside this context."
                )
        stage = self.graph.stage(group, self._done)
        if group == FINAL:
            return self._run_final(stage)
        self._done.update(stage.cells)
        waiting = [item for cell in stage.cells for item in self._pending.pop(cell, {}).items()]
        outputs, grads = _in_order(waiting)
        captured = [leaf.variable for leaf in stage.leaves]  # type: ignore[attr-defined]
        inputs = [*_edges(stage.recvs), *captured]
        if stage.crossings:
            found = self._run_crossing(stage, outputs, grads, inputs)
        else:
            found = self._engine_call(outputs, grads, inputs, self.retain_graph)
        place = len(inputs) - len(captured)
        rank = stage.cells[-1].rank
        for number, (leaf, grad) in enumerate(zip(stage.leaves, found[place:], strict=True)):
            if grad is not None:
                self._put(leaf, 0, (1, rank, -1, number), grad)
        return _reports(stage.recvs, found)

    # ---- one engine call ---------------------------------------------------------------------------------------------

    def _engine_call(
        self, outputs: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Any], retain_graph: bool
    ) -> Sequence[Tensor | None]:
        if not outputs or not inputs:  # all gradients undefined; or nothing wants one
            return (None,) * len(inputs)
        return _gradients(outputs, grads, inputs, retain_graph)

    def _run_crossing(
        self, stage: Stage, outputs: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Any]
    ) -> Sequence[Tensor | None]:
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
                cell = self.graph.cell_of.get(node)
                self._put(target, place, (1, cell.rank if cell else 0, number), grad)
        return found

    def _put(self, node: Node, place: int, label: Label, grad: Tensor) -> None:
        cell = self.graph.cell_of.get(node)
        self._pending.setdefault(cell, {}).setdefault((node, place), []).append((label, grad))

    # ---- the final stage ---------------------------------------------------------------------------------------------

    def _run_final(self, stage: Stage) -> list[Report]:
        waiting = self._pending.pop(None, {})
        leaves: list[Tensor] = [leaf.variable for leaf in stage.leaves]  # type: ignore[attr-defined]
        if any_reduced(leaves):
            return self._run_reduced(stage, leaves, waiting)
        beside: dict[Any, list[tuple[Label, Tensor]]] = {}
        inner: list[tuple[tuple[Node, int], list[tuple[Label, Tensor]]]] = []
        for item in waiting.items():
            node = item[0][0]
            if type(node) is ACCUMULATE and not has_hooks(node):
                beside[node] = item[1]
            else:
                inner.append(item)
        outputs, grads = _in_order(inner)
        edges = _edges(stage.recvs)
        inputs: list[Any] = [*edges, *leaves] if inner else edges
        found = self._engine_call(outputs, grads, inputs, self.retain_graph)
        place = len(edges)
        del waiting, inner, outputs, grads, inputs
        for leaf_node, leaf, grad in zip(stage.leaves, leaves, found[place:] or (None,) * len(leaves), strict=True):
            parts = beside.pop(leaf_node, None) if beside else None
            if parts is not None:
                parts.sort(key=_label)
                own = False
                total = parts[0][1]
                for _, part in parts[1:]:
                    total, own = _sum(total, part, own), True
                if grad is not None:
                    total, own = _sum(total, grad, own), True
                self._land(leaf_node, leaf, total if own else _copied(leaf, total))
            elif grad is not None:
                if _is_ours(leaf, grad):
                    self._land(leaf_node, leaf, grad)
                else:
                    self._land(leaf_node, leaf, _copied(leaf, grad))
        return _reports(stage.recvs, found)

    def _run_reduced(self, stage: Stage, leaves: list[Tensor], waiting: dict[Any, Any]) -> list[Report]:
        """The final stage where DDP's reducer waits for some leaf: AccumulateGrad runs, and so do the recvs' nodes,
        which give their gradients to `report`."""
        outputs, grads = _in_order(waiting.items())
        seen: dict[Node, Any] = {}
        nodes: list[Any] = [received.node for received in stage.recvs]
        inputs: list[Any] = [*leaves, *(GradientEdge(node, 0) for node in nodes)]
        for node in nodes:
            node.report = partial(seen.__setitem__, node)
        try:
            if outputs:
                with aside(leaves, self._move):
                    torch.autograd.backward(
                        outputs,
                        grads,
                        retain_graph=self.retain_graph,
                        inputs=inputs,
                    )
        finally:
            for node in nodes:
                node.report = None
        return [(received, seen.get(received.node) or (None,) * received.outputs) for received in stage.recvs]

    def _move(self, leaf: Tensor, grad: Tensor) -> None:
        with self._context.lock:
            self._add_up(leaf, grad)

    def _land(self, node: Node, leaf: Tensor, grad: Tensor) -> None:
        """Adds to the context. `grad` is nobody else's."""
        context = self._context
        if has_accumulate_hooks(leaf):
            result = accumulate_beside(leaf, node, grad, context.gradients.get(leaf))
            with context.lock:
                if result is None:
                    context.gradients.pop(leaf, None)
                else:
                    context.gradients[leaf] = result
            return
        with context.lock:
            self._add_up(leaf, grad)

    def _add_up(self, leaf: Tensor, grad: Tensor) -> None:
        gradients = self._context.gradients
        before = gradients.get(leaf)
        gradients[leaf] = grad if before is None else _sum(before, grad, True)


def _see(seen: dict[Any, tuple[Any, Any]], node: Any, grad_inputs: Any, grad_outputs: Any) -> None:
    seen[node] = (grad_inputs, grad_outputs)


def _label(item: tuple[Label, Tensor]) -> Label:
    return item[0]


def _in_order(
    waiting: Iterable[tuple[tuple[Node, int], list[tuple[Label, Tensor]]]],
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Edges and gradients for the engine."""
    outputs: list[GradientEdge] = []
    grads: list[Tensor] = []
    for (node, place), parts in waiting:
        edge = GradientEdge(node, place)
        if len(parts) > 1:
            parts.sort(key=_label)
        for _, grad in parts:
            outputs.append(edge)
            grads.append(grad)
    return outputs, grads


def _edges(recvs: Iterable[Received]) -> list[Any]:
    return [GradientEdge(received.node, place) for received in recvs for place in range(received.outputs)]


def _reports(recvs: Iterable[Received], found: Sequence[Tensor | None]) -> list[Report]:
    reports: list[Report] = []
    place = 0
    for received in recvs:
        reports.append((received, found[place : place + received.outputs]))
        place += received.outputs
    return reports


def _sum(total: Tensor, part: Tensor, own: bool) -> Tensor:
    """total + part, in place if `total` is ours and that can be. Dense comes first: torch refuses sparse + dense."""
    if total.layout is not part.layout and total.is_sparse:
        return part + total
    if own and total.layout is torch.strided:
        return total.add_(part)
    return total + part


def _is_ours(leaf: Tensor, grad: Tensor) -> bool:
    """Whether nobody else has this tensor, and its strides are those of the leaf: torch's own rule for `.grad`."""
    if sys.getrefcount(grad) > _IN_A_TUPLE + 1 or _use_count is None or _use_count(grad) > 1:
        return False
    return grad.is_sparse or grad.stride() == leaf.stride()


def _copied(leaf: Tensor, grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided or leaf.layout is not torch.strided:
        return grad.clone()
    return torch.empty_like(leaf, dtype=grad.dtype, requires_grad=False).copy_(grad)
