"""What is recorded of the tensors that travel: edges where they are sent, the node of a function where they come.

Of what was sent the edges are kept, not the tensors: they lead to where the gradients enter this worker's graph, and
keep no data alive. What was received are the results of one function, `Recv`, whose node is the end of the graph here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction as FunctionNode
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd.context import Received, Sent
from telegrad.autograd.execution.grad_capture import deliver
from telegrad.autograd.graph.local_graph import mark_recv

__all__ = ["NOT_BY_ITSELF", "RECV_NODE", "SEND_NODE", "Recv", "edge_of", "edges_of", "received", "sent"]

RECV_NODE = "torch::distributed::autograd::RecvRpcBackward"
"""Torch's name for the node of received tensors. Their gradients go to the sender."""

SEND_NODE = "torch::distributed::autograd::SendRpcBackward"
"""Torch's name for the node of sent tensors, where their gradients arrive."""

NOT_BY_ITSELF = (
    "the graph of this tensor goes on at another worker: call telegrad.autograd.backward(context_id, [loss]) in place"
    " of loss.backward(), within the context in which it was received."
)

# The one input of every Recv, so that its results require grad. No gradient ever gets here.
_anchor = torch.zeros((), requires_grad=True)


@mark_recv
class Recv(torch.autograd.Function):
    """Makes the tensors of one message: what they hold has come already, their gradients go back to the sender.

    A backward pass stops at the node, which it finds by its identity. Only a pass with parameters under
    DistributedDataParallel runs the node, which then delivers its gradients (`grad_capture.py`).
    """

    @staticmethod
    def forward(_ctx: Any, _anchor: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        if not deliver(ctx, gradients):
            raise RuntimeError(NOT_BY_ITSELF)
        return None, None


_new: Any = tuple.__new__  # a record without its constructor's frame
_REST = (None,) * (len(GradientEdge._fields) - 2)
is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_apply: Any = super(torch.autograd.Function, Recv).apply
_in_transform = getattr(torch._C, "_are_functorch_transforms_active", None)


def edge_of(tensor: Tensor) -> tuple[GradientEdge, Node | None]:
    """Where the gradient of a tensor that requires one enters the graph, and what keeps the graph alive, unless the
    edge does: the nodes of Python functions do not. Needs grad mode.

    As `torch.autograd.graph.get_gradient_edge`, but faster for leaves, and for sparse tensors as well.
    """
    node: Any = tensor.grad_fn
    if node is not None and not isinstance(node, FunctionNode):
        return GradientEdge(node, tensor.output_nr), None
    same = tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.transpose(0, 0)
    owner = same.grad_fn
    assert owner is not None
    node, number = owner.next_functions[0]
    assert node is not None
    return GradientEdge(node, number), None if tensor.is_leaf else owner


def edges_of(record: Sent) -> tuple[GradientEdge | None, ...]:
    """The edges of a message's tensors, those of leaves too. None also for a leaf that requires no gradient by now."""
    with torch.inference_mode(False), torch.enable_grad():
        return tuple(
            [
                (edge_of(edge)[0] if edge.requires_grad else None) if isinstance(edge, Tensor) else edge
                for edge in record.edges
            ]
        )


def sent(message: int, peer: int, tensors: Sequence[Tensor]) -> Sent:
    """The record of a message that is about to leave.

    Args:
        tensors: all of it that require grad, in the order in which the receiver makes them.
    """
    if not is_grad_enabled():  # a reply, sent by a thread in which it is off
        with torch.inference_mode(False), torch.enable_grad():
            return sent(message, peer, tensors)
    edges: list[GradientEdge | Tensor] = []
    owners: tuple[Node, ...] = ()
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is None:
            edges.append(tensor)
        elif not isinstance(node, FunctionNode):
            edges.append(_new(GradientEdge, (node, tensor.output_nr, *_REST)))
        else:
            edge, owner = edge_of(tensor)
            edges.append(edge)
            if owner is not None:
                owners = (*owners, owner)
    record: Sent = _new(Sent, (message, peer, tuple(edges), owners))
    return record


def received(message: int, peer: int, tensors: list[Tensor]) -> tuple[Received, tuple[Tensor, ...]]:
    """The record of a message that has come, and its tensors, which require grad from now on.

    Args:
        tensors: leaves that are no views and do not require grad; they are changed.
    """
    if not is_grad_enabled():  # a reply that is read under no_grad was recorded all the same, where it was made
        with torch.inference_mode(False), torch.enable_grad():
            return received(message, peer, tensors)
    # Past `Recv.apply`, whose handling of default arguments and transforms takes as long as the rest.
    apply: Any = Recv.apply if _in_transform is None or _in_transform() else _apply
    made: tuple[Tensor, ...] = apply(_anchor, tensors)
    return _new(Received, (message, peer, made[0].grad_fn, len(made))), made
