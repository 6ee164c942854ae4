"""Distributed autograd: the API of ``torch.distributed.autograd``.

::

    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", forward, args=(x,)).sum()
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)

    with autograd.plain():  # or the option plain_backward
        loss = rpc.rpc_sync("worker1", forward, args=(x,)).sum()
    loss.backward()
"""

from telegrad.autograd.api import (
    DistAutogradContext,
    backward,
    context,
    get_gradients,
    is_available,
    plain,
    register_comm_hook,
)
from telegrad.autograd.passes.comm_hooks import GradientBucket

__all__ = [
    "DistAutogradContext",
    "GradientBucket",
    "backward",
    "context",
    "get_gradients",
    "is_available",
    "plain",
    "register_comm_hook",
]
