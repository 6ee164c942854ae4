"""Scaling of losses for mixed precision, with gradients on other workers.

Torch's own scaler asks an optimizer for nothing but its parameters, and then asserts that they are tensors. So that its
users learn which class they need, `unscale_` of torch's class is wrapped: it checks the optimizer first.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from telegrad.optim.distributed import DistributedOptimizer

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """Scaler of ``torch.amp`` that also works with a `DistributedOptimizer`.

    Torch's own scaler reads gradients of local tensors. This one has the owners unscale their gradients: if one is
    infinite or not a number on any of them, no owner steps. Its device is the device of the loss; parameters may be on
    other devices of their owners. Local optimizers work as with torch's. It is off, as torch's is, if its device is
    "cuda" and CUDA is not available.

    Args:
        device: "cuda" or "cpu", the device type of the loss.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as for ``torch.amp.GradScaler``.

    Example::

        module = RemoteModule("worker1/cpu", torch.nn.Linear, (20, 1))
        optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.05)
        scaler = optim.GradScaler("cpu")
        with autograd.context() as context_id:
            loss = module(torch.ones(8, 20)).sum()
            autograd.backward(context_id, [scaler.scale(loss)])
            scaler.step(optimizer, context_id)
            scaler.update()
    """

    _context_id: int | None = None  # of the gradients that are being unscaled

    def unscale_(self, optimizer: torch.optim.Optimizer, context_id: int | None = None) -> None:
        """Divide the optimizer's gradients by the scale, for example before clipping.

        Args:
            optimizer: a `DistributedOptimizer` or a local optimizer.
            context_id: an autograd context, for its gradients; None for the `.grad` of the parameters.

        Raises:
            RuntimeError: it has been called for this optimizer since the last `update`, or an owner is lost.
            ValueError: a gradient is of type float16.
        """
        with self._in_context(context_id):
            super().unscale_(optimizer)
            if self.is_enabled():  # `step` of torch calls this, too
                self._per_optimizer_states[id(optimizer)]["context_id"] = self._context_id

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients unless `unscale_` has, and step if all are finite.

        Args:
            optimizer: a `DistributedOptimizer` or a local optimizer.
            args, kwargs: of the optimizer's `step`, such as the id of the context.

        Returns:
            The result of the optimizer's `step`; None without a step.

        Raises:
            RuntimeError: it has been called for this optimizer since the last `update`, `unscale_` got another context,
                or an owner is lost.
        """
        context_id = args[0] if args else kwargs.get("context_id")
        if not isinstance(optimizer, DistributedOptimizer) or not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        unscaled = self._per_optimizer_states[id(optimizer)].get("context_id", context_id)
        if unscaled != context_id:
            raise RuntimeError(
                f"step() is for {_gradients_of(context_id)}, but unscale_() has unscaled {_gradients_of(unscaled)}"
                " since the last update(). Give both the same context_id."
            )
        with self._in_context(context_id):
            return super().step(optimizer, *args, **kwargs)

    @contextmanager
    def _in_context(self, context_id: int | None) -> Iterator[None]:
        before, self._context_id = self._context_id, context_id if context_id is not None else self._context_id
        try:
            yield
        finally:
            self._context_id = before

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, DistributedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = optimizer._unscale(self._context_id, inv_scale.item())
        return {found_inf.device: found_inf.fill_(float(found))}


def _gradients_of(context_id: int | None) -> str:
    return "the .grad of the parameters" if context_id is None else f"the gradients of context {context_id}"


def _refuse_remote(unscale: Callable[..., None]) -> Callable[..., None]:
    """Wrap `unscale_` of torch's scaler to refuse remote parameters."""

    @functools.wraps(unscale)
    def checked(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, DistributedOptimizer) and not isinstance(self, GradScaler) and self.is_enabled():
            raise TypeError(
                "this GradScaler of torch reads the gradients of local tensors, but the parameters of a"
                " DistributedOptimizer are on their owners. Use telegrad.optim.GradScaler instead."
            )
        unscale(self, optimizer)

    return checked


setattr(torch.amp.GradScaler, "unscale_", _refuse_remote(torch.amp.GradScaler.unscale_))  # noqa: B010  # for mypy
