"""Leaves with an AccumulateGrad node that must run.

These are parameters under DDP, and leaves with post-accumulate hooks.

Usually the engine returns a leaf's gradient, and `.grad` is not touched; DDP's reducer, and hooks on `.grad`, would not
run. For these leaves the node runs while `.grad` is the gradient of the context, and the result in `.grad` is moved to
the context. Then `.grad` is restored.

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
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from telegrad.autograd.context import Context

__all__ = ["grads_from_context", "has_ddp_param", "reduced_with", "run_accumulate_grad"]

_grad_lock = threading.RLock()
_replicas: WeakKeyDictionary[torch.nn.Module, dict[int, ref[Tensor]]] = WeakKeyDictionary()
"""Replica -> its parameters by id: they may refer to the replica."""
_used_ddp: list[bool] = []  # not empty once a replica was created


def _on_registration(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    """Record the module that DDP replicates: DDP registers it before anything else."""
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        _used_ddp[:] = [True]
        _replicas[module] = {id(parameter): ref(parameter) for parameter in submodule.parameters()}


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
    return any(not parameters.isdisjoint(replica) for replica in list(_replicas.values()))


def reduced_with(leaves: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return all parameters of the replicas that have one of these leaves, by id."""
    found: dict[int, Tensor] = {}
    if _used_ddp:
        parameters = {id(leaf) for leaf in leaves}
        for replica in list(_replicas.values()):
            if not parameters.isdisjoint(replica):
                found.update((key, tensor) for key, reference in replica.items() if (tensor := reference()) is not None)
    return found


@contextmanager
def grads_from_context(
    context: Context, leaves: Sequence[Tensor], add: Callable[[Context, Tensor, Tensor], None] | None = None
) -> Iterator[None]:
    """Set `.grad` of leaves to their gradients in a context, and move it back.

    As in local training, DDP's reducer and hooks get the sum with earlier passes of the context. The reducer also reads
    and writes `.grad` of parameters that the pass does not reach. After an error the context has what it had.

    Args:
        context: The context.
        leaves: The leaves that the pass reaches.
        add: Adds a gradient to the context, for leaves without hooks and reducer: other passes may do so meanwhile.
    """
    with _grad_lock:  # until the context has the sums: another pass of the context may do the same
        reduced = reduced_with(leaves)
        summed = [leaf for leaf in leaves if id(leaf) in reduced or getattr(leaf, "_post_accumulate_grad_hooks", None)]
        others = [leaf for leaf in leaves if id(leaf) not in {id(found) for found in summed}]
        summed += [leaf for key, leaf in reduced.items() if key not in {id(found) for found in summed}]
        # With this option DDP makes `.grad` a view of its buckets, also the `.grad` of the program, and reuses them.
        views = any(getattr(replica, "gradient_as_bucket_view", False) for replica in list(_replicas))
        before = [(leaf, _own(leaf.grad, views)) for leaf in (*summed, *others)]
        try:
            with context.lock:
                starts = [context.gradients.get(leaf) for leaf in summed]
            for leaf, start in zip(summed, starts, strict=True):
                leaf.grad = _own(start, True)  # the engine may add in place
            for leaf in others:
                leaf.grad = None
            yield
            for leaf in summed:
                grad, leaf.grad = _own(leaf.grad, views), None
                with context.lock:
                    if grad is None:
                        context.gradients.pop(leaf, None)
                    else:
                        context.gradients[leaf] = grad
            for leaf in others:
                grad, leaf.grad = _own(leaf.grad, views), None
                if grad is not None and add is not None:
                    add(context, leaf, grad)
        finally:
            for leaf, grad in before:
                leaf.grad = grad


def _own(grad: Tensor | None, copied: bool) -> Tensor | None:
    return grad.clone() if copied and grad is not None else grad


def run_accumulate_grad(leaf: Tensor, grad: Tensor, context: Context) -> None:
    """Run the AccumulateGrad node of a leaf with post-accumulate hooks.

    Its tensor hooks have run. The context gets the `.grad` that the other hooks leave.
    """
    with torch.inference_mode(False), torch.enable_grad():
        node = get_gradient_edge(leaf).node
    with grads_from_context(context, (leaf,)):
        node(grad)  # type: ignore[operator]  # typed as an abstract class
