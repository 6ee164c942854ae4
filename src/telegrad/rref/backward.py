"""``RRef.backward``: a backward pass that begins at a referenced value, on its owner."""

from typing import TYPE_CHECKING, Any

import torch

from telegrad import autograd
from telegrad.errors import RRefError

if TYPE_CHECKING:
    from telegrad.rref.rref import RRef

__all__ = ["run_backward"]


def run_backward(rref: "RRef[Any]", context_id: int, retain_graph: bool) -> None:
    """Run the pass, here or on the owner; see `telegrad.rpc.RRef.backward`.

    Runs on the caller, which has the owner run it, too.
    """
    if not rref.is_owner():
        if context_id == -1:
            raise RRefError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: the owner's graph may go on elsewhere."
            )
        calls = rref.checked().calls
        arguments = (rref, context_id, retain_graph)
        calls.client.call(rref.owner_id, run_backward, arguments, {}, calls.default_timeout)
        return
    root = rref.local_value()
    if not isinstance(root, torch.Tensor):
        raise RRefError(f"RRef should contain a tensor for .backward(), but it refers to a {type(root).__name__}.")
    if context_id == -1:
        root.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        with rref.worker:
            autograd.backward(context_id, [root], retain_graph)
