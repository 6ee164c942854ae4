"""Records of tensors in messages: edges of sent ones, nodes of received ones.

A sender keeps the edges of its tensors, not the tensors: the edges lead to where the gradients enter its local graph,
and keep no data alive. At the receiver the tensors are outputs of one function, `Recv`; the local graph ends at its
node.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd.context import Received, Sent
from telegrad.autograd.execution.grad_capture import deliver
from telegrad.autograd.graph.local_graph import mark_recv

__all__ = [
    "LOCAL_BACKWARD",
    "NOT_STARTED",
    "RECV_NODE",
    "SEND_NODE",
    "Recv",
    "edge_of",
    "edges_of",
    "record_received",
    "record_sent",
]

RECV_NODE = "torch::distributed::autograd::RecvRpcBackward"
"""Torch's name for the node of received tensors. Their gradients go to the sender."""

SEND_NODE = "torch::distributed::autograd::SendRpcBackward"
"""Torch's name for the node of sent tensors, at which their gradients arrive."""

NOT_STARTED = (
    "the graph of this tensor continues on worker {peer}, and the pass cannot continue there: this worker has shut"
    " down, or the pass was not started by torch.autograd.backward or torch.autograd.grad (is_grads_batched and"
    " functions of torch.func are not supported over several workers)."
)

LOCAL_BACKWARD = (
    "the graph of this tensor continues on another worker: call telegrad.autograd.backward(context_id, [loss]) instead"
    " of loss.backward(), within the context in which the tensor was received."
)

# The only input of every Recv, so that its outputs require grad. It never gets a gradient.
_anchor = torch.zeros((), requires_grad=True)


@mark_recv
class Recv(torch.autograd.Function):
    """The function that outputs the tensors of one message.

    Their gradients go back to the sender. A backward pass stops at the node, which it finds by its
    identity. Only a pass with parameters under DistributedDataParallel, or one without a context, runs the node, which
    then delivers its gradients (`grad_capture.py`).
    """

    @staticmethod
    def forward(_ctx: object, _anchor: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensors)

    @staticmethod
    def backward(ctx: BackwardCFunction, *gradients: Tensor | None) -> tuple[None, None]:
        if not deliver(ctx, gradients):
            receipt = getattr(ctx, "receipt", None)
            if receipt is not None:
                raise RuntimeError(NOT_STARTED.format(peer=receipt.context.name_of(receipt.peer)))
            raise RuntimeError(LOCAL_BACKWARD)
        return None, None


_python_function: type = BackwardCFunction  # class of the nodes of Python functions
is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_apply: Callable[[Tensor, list[Tensor]], tuple[Tensor, ...]] = super(torch.autograd.Function, Recv).apply
_in_transform: Callable[[], bool] | None = getattr(torch._C, "_are_functorch_transforms_active", None)


def edge_of(tensor: Tensor) -> tuple[GradientEdge, Node | None]:
    """Return the gradient edge of a tensor, and the node that keeps the graph alive.

    The tensor must require grad. The node is None if the edge itself keeps the graph alive; nodes of Python
    functions do not. Needs grad mode. Like `torch.autograd.graph.get_gradient_edge`, but faster for leaves, and for
    sparse tensors as well.
    """
    node = tensor.grad_fn
    if node is not None and not isinstance(node, _python_function):
        return GradientEdge(node, tensor.output_nr), None
    same = tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.transpose(0, 0)
    owner = same.grad_fn
    assert owner is not None
    node, number = owner.next_functions[0]
    assert node is not None
    return GradientEdge(node, number), None if tensor.is_leaf else owner


def _gets_gradients(leaf: Tensor) -> bool:
    """Return whether a leaf that is a view accumulates gradients. Needs grad mode.

    A view that was made under no_grad requires grad if its base does, and has no node.
    """
    node = leaf.view_as(leaf).grad_fn if leaf.layout is torch.strided else leaf.transpose(0, 0).grad_fn
    return node is not None and node.next_functions[0][0] is not None


def edges_of(record: Sent) -> tuple[GradientEdge | None, ...]:
    """Return the edges of a message's tensors; None for those without gradient."""
    with torch.inference_mode(False), torch.enable_grad():
        return tuple(
            [
                (edge_of(edge)[0] if edge.requires_grad else None) if isinstance(edge, Tensor) else edge
                for edge in record.edges
            ]
        )


def record_sent(message: int, peer: int, tensors: Sequence[Tensor], epoch: int = 0) -> Sent:
    """Create the record of a message that is about to leave.

    Args:
        message: Its id.
        peer: The receiver.
        tensors: All its tensors that require grad, in the order in which the receiver decodes them.
        epoch: See `Sent`.
    """
    if not is_grad_enabled():  # a reply, sent by a thread with gradients disabled
        with torch.inference_mode(False), torch.enable_grad():
            return record_sent(message, peer, tensors, epoch)
    edges: list[GradientEdge | Tensor] = []
    owners: tuple[Node, ...] = ()
    for tensor in tensors:
        node = tensor.grad_fn
        if node is None:
            # Readers skip a tensor that does not require grad, as a leaf of which that was changed.
            edges.append(tensor.detach() if tensor._is_view() and not _gets_gradients(tensor) else tensor)
        elif not isinstance(node, _python_function):
            edges.append(GradientEdge(node, tensor.output_nr))
        else:
            edge, owner = edge_of(tensor)
            edges.append(edge)
            if owner is not None:
                owners = (*owners, owner)
    return Sent(message, peer, tuple(edges), owners, epoch)


def record_received(message: int, peer: int, tensors: list[Tensor]) -> tuple[Received, tuple[Tensor, ...]]:
    """Create the record of a received message, and its tensors, which require grad.

    Args:
        message: Its id.
        peer: The sender.
        tensors: Leaves that are no views and do not require grad; they are changed.
    """
    if not is_grad_enabled():  # a reply read under no_grad was recorded by its sender nevertheless
        with torch.inference_mode(False), torch.enable_grad():
            return record_received(message, peer, tensors)
    # Not `Recv.apply`: handling default arguments and transforms takes as long as the rest.
    apply = Recv.apply if _in_transform is None or _in_transform() else _apply
    outputs: tuple[Tensor, ...] = apply(_anchor, tensors)
    node = outputs[0].grad_fn
    assert node is not None
    return Received(message, peer, node, len(outputs)), outputs
