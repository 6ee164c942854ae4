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
Waiting = dict[tuple["Node", int], list[tuple[Label, Tensor]]]

_engine = getattr(torch.autograd.graph, "_engine_run_backward", None)
_python_function: type = getattr(torch._C, "_FunctionBase", torch.autograd.Function)
_use_count = getattr(Tensor, "_use_count", None)


def _references(thing: object) -> int:
    return sys.getrefcount(thing)


def _references_at_rest() -> tuple[int, int]:
    """What `_references` gives for what one variable holds, and for what a tuple holds and a loop looks at."""
    alone = object()
    for inside in (object(),):
        return _references(alone), _references(inside)
    raise AssertionError


_ALONE, _ALONE_IN_TUPLE = _references_at_rest()


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

    def __init__(self, context: Context, graph: LocalGraph) -> None:
        self.graph = graph
        self.retain_graph = False
        self._context = context
        self._done: set[Cell] = set()
        self._arrived = 0
        # where (see LocalGraph.home; None: the final stage) -> edge -> [(label, gradient)]
        self._pending: dict[Any, dict[tuple[Node, int], list[tuple[Label, Tensor]]]] = {}

    def edges_of(self, source: int) -> int:
        """How many gradients a source gets. Raises UnknownSend."""
        edges = self.graph.sources.get(source)
        if edges is None:
            raise UnknownSend(source, "sent no tensors from here, or did so after backward began")
        if self._arrived >> self.graph.bits[source] & 1:
            raise UnknownSend(source, "had its gradient already")
        return len(edges)

    def add(self, source: int, grads: Iterable[Tensor | None]) -> None:
        """The gradients of a source have arrived, one for each of its edges."""
        graph = self.graph
        bit = graph.bits[source]
        self._arrived |= 1 << bit
        label = (0, bit)
        for edge, grad in zip(graph.sources[source], grads, strict=True):
            if edge is not None and grad is not None:
                self._put(bit, edge.node, edge.output_nr, label, grad)

    def pending(self) -> bool:
        """Whether gradients wait that only the final stage takes up."""
        graph = self.graph
        return bool(self._pending.get(0 if len(graph.bits) == 1 and graph.is_forest else None))

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
            waiting = {edge: parts for cell in stage.cells for edge, parts in self._pending.pop(cell, {}).items()}
        else:
            home = None if group == FINAL else group
            if home is None and graph.is_forest and len(graph.bits) == 1:
                home = 0
            waiting = self._pending.pop(home, {})
            if group == FINAL and any_reduced(stage.whole):
                return self._run_reduced(stage, waiting)
        inputs: list[Any] = [
            GradientEdge(received.node, place) for received in stage.recvs for place in range(received.outputs)
        ]
        if not stage.crossings and all(type(node) is ACCUMULATE and not has_hooks(node) for node, _ in waiting):
            self._land_directly(waiting)
            return _reports(stage.recvs, (None,) * len(inputs))
        recvs = len(inputs)
        whole = [leaf.variable for leaf in stage.whole]  # type: ignore[attr-defined]
        inputs += whole
        inputs += [leaf.variable for leaf in stage.parts]  # type: ignore[attr-defined]
        outputs, grads = _in_order(waiting)
        del waiting
        if stage.crossings:
            found = self._run_crossing(stage, outputs, grads, inputs)
        else:
            found = self._engine_call(outputs, grads, inputs, self.retain_graph)
        del outputs, grads, inputs
        reports = _reports(stage.recvs, found)
        if stage.parts:
            for number, (leaf, grad) in enumerate(zip(stage.parts, found[recvs + len(whole) :], strict=True)):
                if grad is not None:
                    self._put(-1, leaf, 0, (1, stage.rank, -1, number), grad)
        if whole:
            found = found[recvs : recvs + len(whole)]
            for leaf, variable, grad in zip(stage.whole, whole, found, strict=True):
                if grad is not None:
                    alone = _references(grad) <= _ALONE_IN_TUPLE
                    self._land(leaf, variable, grad if alone and _fits(variable, grad) else _copied(variable, grad))
        return reports

    # ---- one engine call -------------------------------------------------------------------------------------------

    def _engine_call(
        self, outputs: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Any], retain_graph: bool
    ) -> tuple[Tensor | None, ...]:
        if not outputs or not inputs:  # all gradients undefined; or nothing wants one
            return (None,) * len(inputs)
        return _gradients(outputs, grads, inputs, retain_graph)

    def _run_crossing(
        self, stage: Stage, outputs: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Any]
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
                self._put(-1, target, place, (1, self.graph.cell_of[node].rank, number), grad)
        return found

    def _put(self, source: int, node: Node, place: int, label: Label, grad: Tensor) -> None:
        """Lets a gradient wait. `source`: the bit of the source for which it came, or -1 if a stage made it."""
        home = self.graph.home(source, node)
        self._pending.setdefault(home, {}).setdefault((node, place), []).append((label, grad))

    def _run_reduced(self, stage: Stage, waiting: Waiting) -> list[Report]:
        """The final stage where DDP's reducer waits for some leaf: AccumulateGrad runs, and so do the recvs' nodes,
        which give their gradients to `report`."""
        outputs, grads = _in_order(waiting)
        leaves: list[Tensor] = [leaf.variable for leaf in stage.whole]  # type: ignore[attr-defined]
        seen: dict[Node, Any] = {}
        nodes: list[Any] = [received.node for received in stage.recvs]
        inputs: list[Any] = [*leaves, *(GradientEdge(node, 0) for node in nodes)]
        for node in nodes:
            node.report = partial(seen.__setitem__, node)
        try:
            if outputs:
                with aside(leaves, self._add_up):
                    torch.autograd.backward(outputs, grads, retain_graph=self.retain_graph, inputs=inputs)
        finally:
            for node in nodes:
                node.report = None
        return [(received, seen.get(received.node) or (None,) * received.outputs) for received in stage.recvs]

    # ---- gradients of leaves ---------------------------------------------------------------------------------------

    def _land_directly(self, waiting: Waiting) -> None:
        """Gradients that wait at leaves need no engine."""
        storages: set[int] = set()
        for (node, _), parts in waiting.items():
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            if len(parts) == 1:
                grad = parts.pop()[1]
                alone = _references(grad) <= _ALONE and grad.layout is torch.strided
                if alone and len(waiting) > 1:  # tensors of one message may share their memory
                    storage = grad.untyped_storage().data_ptr()
                    alone = storage not in storages
                    storages.add(storage)
                self._land(node, leaf, grad if alone and _fits(leaf, grad) else _copied(leaf, grad))
                continue
            parts.sort(key=_label)
            total = _sum(parts[0][1], parts[1][1], False)
            for _, part in parts[2:]:
                total = _sum(total, part, True)
            self._land(node, leaf, total)

    def _land(self, node: Node, leaf: Tensor, grad: Tensor) -> None:
        """Adds to the context. `grad` is nobody else's."""
        if not has_accumulate_hooks(leaf):
            self._add_up(leaf, grad)
            return
        context = self._context
        result = accumulate_beside(leaf, node, grad, context.gradients.get(leaf))
        with context.lock:
            if result is None:
                context.gradients.pop(leaf, None)
            else:
                context.gradients[leaf] = result

    def _add_up(self, leaf: Tensor, grad: Tensor) -> None:
        gradients = self._context.gradients
        with self._context.lock:
            before = gradients.get(leaf)
            gradients[leaf] = grad if before is None else _sum(before, grad, False)


def _see(seen: dict[Any, tuple[Any, Any]], node: Any, grad_inputs: Any, grad_outputs: Any) -> None:
    seen[node] = (grad_inputs, grad_outputs)


def _label(item: tuple[Label, Tensor]) -> Label:
    return item[0]


def _in_order(waiting: Waiting) -> tuple[list[GradientEdge], list[Tensor]]:
    """Edges and gradients for the engine."""
    outputs: list[GradientEdge] = []
    grads: list[Tensor] = []
    for (node, place), parts in waiting.items():
        edge = GradientEdge(node, place)
        if len(parts) > 1:
            parts.sort(key=_label)
        for _, grad in parts:
            outputs.append(edge)
            grads.append(grad)
    return outputs, grads


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


def _fits(leaf: Tensor, grad: Tensor) -> bool:
    """Whether no other tensor object of torch's is this one, and its strides are those of the leaf: together with the
    count of Python's references torch's own rule for when `.grad` may be the very tensor that came."""
    return _use_count is not None and _use_count(grad) <= 1 and (grad.is_sparse or grad.stride() == leaf.stride())


def _copied(leaf: Tensor, grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided or leaf.layout is not torch.strided:
        return grad.clone()
    return torch.empty_like(leaf, dtype=grad.dtype, requires_grad=False).copy_(grad)
