"""Leaves with an AccumulateGrad node that must run.

These are parameters under DDP, and leaves with post-accumulate hooks.

Usually the engine returns a leaf's gradient, and `.grad` is not touched; DDP's reducer, and hooks on `.grad`, would not
run. For these leaves the node runs while `.grad` is detached, and its result in `.grad` is moved to the context. Then
`.grad` is restored.

Meanwhile other threads that read `.grad` of these leaves see the context's gradient, and passes of this process wait
for each other. Only here user code (these hooks) runs under a lock of Telegrad, because a leaf has only one `.grad`.
The lock is reentrant; a hook must not wait for a backward pass of another thread.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from telegrad.autograd.context import Context

__all__ = ["grads_detached", "has_ddp_param", "reduced_with", "run_accumulate_grad"]

_grad_lock = threading.RLock()
_replicas: WeakKeyDictionary[torch.nn.Module, frozenset[int]] = WeakKeyDictionary()
_used_ddp: list[bool] = []  # not empty once a replica was created


def _on_registration(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    """Record the module that DDP replicates: DDP registers it before anything else."""
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        _used_ddp[:] = [True]
        _replicas[module] = frozenset(id(p) for p in submodule.parameters())


register_module_module_registration_hook(_on_registration)
if torch.distributed.is_available() and torch.distributed.is_initialized():
    for _found in gc.get_objects():  # replicas created before this module was imported
        if isinstance(_found, DistributedDataParallel):
            _on_registration(_found, "module", _found.module)
    del _found


def has_ddp_param(leaves: Sequence[Tensor]) -> bool:
    """Return whether a reducer of DDP waits for the gradient of one of these leaves."""
    if not _used_ddp:
        return False
    parameters = {id(leaf) for leaf in leaves}
    return any(not parameters.isdisjoint(ids) for ids in list(_replicas.values()))


def reduced_with(leaves: Sequence[Tensor]) -> set[int]:
    """Return the ids of all parameters of the replicas that have one of these leaves."""
    if not _used_ddp:
        return set()
    parameters = {id(leaf) for leaf in leaves}
    found = [ids for ids in list(_replicas.values()) if not parameters.isdisjoint(ids)]
    return set().union(*found)


@contextmanager
def grads_detached(leaves: Sequence[Tensor], put: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Detach `.grad` from the leaves within, and restore it at the end.

    Args:
        leaves: The leaves.
        put: Gets each leaf, and its `.grad` at the end, unless there is an error.
    """
    with _grad_lock:
        # With this option DDP makes `.grad` a view of its buckets, also the `.grad` of the program, and reuses them.
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
    """Run the AccumulateGrad node of a leaf with post-accumulate hooks.

    Its tensor hooks have run. As in local training the hooks see in `.grad` the sum of `grad` and the
    gradient that the context already has. The context gets the `.grad` that they leave.
    """
    with torch.inference_mode(False), torch.enable_grad():
        node = get_gradient_edge(leaf).node
    with _grad_lock:  # until the context has the sum: another pass of the context may do the same
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
