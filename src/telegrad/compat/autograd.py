"""Replacement of ``torch.distributed.autograd`` in a drop-in.

It has the names of `telegrad.autograd` and torch's private ones. Importing it gives the nodes of received tensors
torch's name, which graph viewers and programs read: ``grad_fn.name()``, ``type(grad_fn).__name__``.
"""

from telegrad.autograd import DistAutogradContext, backward, context, get_gradients, is_available
from telegrad.autograd.api import (
    _current_context,
    _get_debug_info,
    _get_max_id,
    _init,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
)
from telegrad.autograd.recording import RECV_NODE as _RECV_NODE
from telegrad.autograd.recording import Recv as _Recv

__all__ = [
    "DistAutogradContext",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_init",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "backward",
    "context",
    "get_gradients",
    "is_available",
]


def _name_nodes_as_torch_does() -> None:
    node = _Recv._backward_cls  # its __name__ is what grad_fn.name() returns
    node.__name__ = _RECV_NODE
    node.__module__, node.__qualname__ = "torch.distributed.autograd", "RecvRpcBackward"


_name_nodes_as_torch_does()
