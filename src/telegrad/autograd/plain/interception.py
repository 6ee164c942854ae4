"""Start of passes without a context, from torch's own functions.

Every call of `torch.autograd.backward`, `torch.autograd.grad` and `Tensor.backward` ends in `run_backward` of one
object. The first message that arrives in a plain context, or the first context, replaces this object. A call whose
roots lead to tensors that were received in a plain context becomes a pass over all workers; all others go to torch
unchanged, if their gradients are complete (`incomplete.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor
from torch.autograd import Variable

from telegrad.autograd.execution.leaves import add_to_grad
from telegrad.autograd.execution.torch_engine import takes_local_call
from telegrad.autograd.execution.wanted import Wanted, entry_of
from telegrad.autograd.graph.local_graph import ends_of
from telegrad.autograd.incomplete import refuse_incomplete
from telegrad.autograd.plain.records import PlainContext, any_receipts, receipt_of
from telegrad.errors import NotInitialized
from telegrad.serialize.tensor_layout import is_of_transform

if TYPE_CHECKING:
    from telegrad.autograd.context import Entry

__all__ = ["install"]

CREATE_GRAPH = (
    "create_graph=True is not supported over several workers: gradients that are sent are not differentiable. The loss"
    " depends on a tensor that worker {} has sent; detach() it, or compute the second derivative on one worker."
)
SEVERAL = (
    "the roots depend on tensors that several workers of this process have received. A backward pass has one worker:"
    " call it once for each."
)
IN_TRANSFORM = (
    "is_grads_batched=True and the transforms of torch.func are not supported over several workers. The roots depend on"
    " a tensor that worker {} has sent: call torch.autograd.grad once for each vector, or detach() the tensor."
)
NOT_A_LEAF = (
    "backward(inputs=...) over several workers accumulates only into leaves. Use torch.autograd.grad for the gradients"
    " of other tensors."
)
UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is the"
    " desired behavior."
)
if TYPE_CHECKING:
    from torch._C import _ImperativeEngine as _Engine
else:
    _Engine = type(Variable._execution_engine)


class PlainEngine(_Engine):
    """Torch's engine for Python, with passes over several workers."""

    def run_backward(  # type: ignore[override]
        self,
        tensors: Sequence[Entry],
        grad_tensors: Sequence[Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Entry] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Run a backward pass of the local graph, or over all workers to which it leads."""
        context = None
        is_local = takes_local_call()
        if not is_local and any_receipts():
            context = _context_of(tensors)
            if context is not None and inputs and not _may_return(context, inputs):
                context = None
        if context is None:
            if inputs and not is_local:
                refuse_incomplete(tensors, inputs)
            found: tuple[Tensor | None, ...] = super().run_backward(
                tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
            )
            return found
        if any(is_of_transform(tensor) for tensor in (*tensors, *grad_tensors) if isinstance(tensor, Tensor)):
            raise RuntimeError(IN_TRANSFORM.format(_senders(tensors)))
        if create_graph:
            raise RuntimeError(CREATE_GRAPH.format(_senders(tensors)))
        if context.backward is None or context.ended:
            raise NotInitialized.closed("The roots depend on tensors that it has received.")
        wanted = Wanted(inputs) if inputs else None
        if wanted is not None and accumulate_grad and not wanted.has_only_leaves:
            raise RuntimeError(NOT_A_LEAF)
        context.backward(context, tensors, bool(keep_graph), grad_tensors, wanted)
        if wanted is None:
            return ()
        results = wanted.results()
        if accumulate_grad:
            for leaf, gradient in dict(zip(map(entry_of, inputs), results, strict=True)).items():  # each leaf once
                if gradient is not None:
                    add_to_grad(cast("Tensor", leaf), gradient)
            return ()
        if not allow_unreachable and None in [gradient if gradient is None else 0 for gradient in results]:
            raise RuntimeError(UNUSED)
        return tuple(results)


def install() -> None:
    """Replace torch's engine for Python by one that continues on other workers."""
    if not isinstance(Variable._execution_engine, PlainEngine):
        Variable._execution_engine = PlainEngine()


def _context_of(roots: Sequence[Entry]) -> PlainContext | None:
    """Return the plain context of the received tensors below the roots, or None.

    Raises:
        RuntimeError: There are several.
    """
    for root in roots:
        if isinstance(root, Tensor) and not root.requires_grad:
            return None  # torch has the error
    found = {receipt.context for node in ends_of([entry_of(root) for root in roots]) if (receipt := receipt_of(node))}
    if len(found) > 1:
        raise RuntimeError(SEVERAL)
    return found.pop() if found else None


def _senders(roots: Sequence[Entry]) -> str:
    nodes = ends_of([entry_of(root) for root in roots])
    receipts = [receipt for node in nodes if (receipt := receipt_of(node))]
    return ", ".join(sorted({receipt.context.name_of(receipt.peer) for receipt in receipts}))


def _may_return(context: PlainContext, inputs: Sequence[Entry]) -> bool:
    """Return whether gradients from other workers can reach one of the inputs.

    They return only to what this worker has sent.
    """
    return any(context.components.reaches(entry_of(tensor)) for tensor in inputs)
