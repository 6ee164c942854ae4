"""What ``torch.distributed.autograd`` points at in a drop-in: `telegrad.autograd`, and torch's private names."""

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
