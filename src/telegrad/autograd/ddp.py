"""Leaves whose AccumulateGrad node must run: parameters under DDP, and leaves with post-accumulate hooks.

Elsewhere a leaf's gradient is captured as an output of the engine, and `.grad` is not touched. DDP's reducer, and hooks
that belong to `.grad`, see nothing of that. So for them the node runs, with `.grad` put aside, and what it leaves in
`.grad` is moved to the context; then `.grad` is what it was.

While that happens another thread that reads `.grad` of these leaves sees the context's gradient; passes of this process
wait for each other. That is the one place where user code (those hooks) runs under a lock of ours, because `.grad` is
one place, too. The lock is re-entrant; a hook must not wait for a backward pass of another thread.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from telegrad.autograd.context import Context

__all__ = ["grads_detached", "has_ddp_param", "run_accumulate_grad"]

_grad_lock = threading.RLock()
_replicas: WeakKeyDictionary[torch.nn.Module, frozenset[int]] = WeakKeyDictionary()
_ever: list[bool] = []  # not empty once there was one


def _notice(module: torch.nn.Module, name: str, submodule: Any) -> None:
    """DDP has registered the module that it replicates: the first thing that it does."""
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        _ever[:] = [True]
        _replicas[module] = frozenset(id(p) for p in submodule.parameters())


register_module_module_registration_hook(_notice)
if torch.distributed.is_available() and torch.distributed.is_initialized():
    for _found in gc.get_objects():  # those made before this module was imported
        if isinstance(_found, DistributedDataParallel):
            _notice(_found, "module", _found.module)
    del _found


def has_ddp_param(leaves: Sequence[Tensor]) -> bool:
    """Return whether a reducer of DDP waits for the gradient of one of these leaves."""
    if not _ever:
        return False
    parameters = {id(leaf) for leaf in leaves}
    return any(not parameters.isdisjoint(ids) for ids in list(_replicas.values()))


@contextmanager
def grads_detached(leaves: Sequence[Tensor], put: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Takes `.grad` off the leaves; at the end, unless there is an error, gives what is there then to `put`. `.grad` is
    restored."""
    with _grad_lock:
        # With this option DDP makes `.grad` a view of its buckets, even the program's own, and reuses them.
        views = any(getattr(replica, "gradient_as_bucket_view", False) for replica in list(_replicas))
        before = [leaf.grad.clone() if views and leaf.grad is not None else leaf.grad for leaf in leaves]
        try:
            for leaf in leaves:
                leaf.grad = None
            yield
            for leaf in leaves:
                grad = leaf.grad
                if grad is not None:
                    leaf.grad = None
                    put(leaf, grad.clone() if views else grad)
        finally:
            for leaf, grad in zip(leaves, before, strict=True):
                leaf.grad = grad


def run_accumulate_grad(leaf: Tensor, grad: Tensor, context: Context) -> None:
    """Runs the AccumulateGrad node of a leaf with post-accumulate hooks (its tensor hooks have run). As in local
    training the hooks see `grad` added to what the context has so far, in `.grad`; it gets what they leave there."""
    with torch.inference_mode(False), torch.enable_grad():
        node = get_gradient_edge(leaf).node
    with _grad_lock:  # from the look at what there is to its change: another pass of the context may do the same
        before = leaf.grad
        try:
            with context.lock:
                leaf.grad = context.gradients.get(leaf)
            node(grad)  # type: ignore[operator]  # typed as an abstract class
            with context.lock:
                if leaf.grad is None:
                    context.gradients.pop(leaf, None)
                else:
                    context.gradients[leaf] = leaf.grad
        finally:
            leaf.grad = before
