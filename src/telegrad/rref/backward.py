"""``RRef.backward``: a backward pass with a referenced value as its root."""

import torch

from telegrad import autograd
from telegrad.errors import RRefError
from telegrad.rref.handle import AnyHandle
from telegrad.worker import Worker
from telegrad.worker.scope import current

__all__ = ["run_backward"]

NO_CONTEXT = (
    "User RRefs require 'dist_autograd_ctx_id' to be specified: the owner's graph may continue on other workers. Or"
    " make the call within telegrad.autograd.plain(), where rref.backward() and rref.to_here().sum().backward() need"
    " none."
)


def run_backward(rref: AnyHandle, context_id: int, retain_graph: bool) -> None:
    """Run the pass on the owner; see `telegrad.rpc.RRef.backward`.

    Another worker calls this function on the owner.
    """
    if not rref.is_owner():
        calls = rref._usable_worker().calls
        if context_id == -1 and not _is_plain(rref.worker):
            raise RRefError(NO_CONTEXT)
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


def _is_plain(worker: Worker) -> bool:
    """Return whether calls of the running code are recorded outside of contexts."""
    scope = current.get()
    context = worker.autograd.outside if scope is None or scope.autograd is None else scope.autograd
    return context is worker.autograd.plain
