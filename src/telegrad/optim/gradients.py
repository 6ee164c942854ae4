"""Gradients of an owner's parameters: of an autograd context, or their `.grad`."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.execution.leaves import sum_of

__all__ = ["accumulate", "gradients_of", "norms", "scale", "unscale", "zero"]


def gradients_of(worker: Any, context: int | None, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return gradients by parameter, for parameters that have one.

    Args:
        worker: the `telegrad.worker.Worker` that owns the parameters.
        context: id of an autograd context, which this worker may not know; None for `.grad`.
        parameters: leaf tensors. A context's gradients may have further ones.
    """
    if context is None:
        return {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    found = worker.autograd.find(context)
    if found is None:
        return {}
    with found.lock:
        return dict(found.gradients)


def accumulate(worker: Any, context: int, parameters: Iterable[Tensor]) -> None:
    """Move gradients of a context to `.grad`, as a local backward pass would add them."""
    found = worker.autograd.find(context)
    if found is None:
        return
    with found.lock:
        moved = [(one, found.gradients.pop(one)) for one in parameters if one in found.gradients]
    for parameter, gradient in moved:
        before = parameter.grad
        if before is None:
            parameter.grad = gradient
        elif before.layout is torch.strided:
            with torch.no_grad():
                before.add_(gradient)
        else:
            parameter.grad = sum_of([before, gradient])


def zero(parameters: Iterable[Tensor], set_to_none: bool) -> None:
    """Remove the `.grad` of parameters, or set it to zero."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if set_to_none:
            parameter.grad = None
        else:  # as in torch: a view cannot be detached
            if gradient.grad_fn is not None:
                gradient.detach_()
            else:
                gradient.requires_grad_(False)
            gradient.zero_()


def norms(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norms of at least one gradient, in one tensor on the CPU."""
    values = [_values(gradient) for gradient in gradients]
    with torch.no_grad():
        return torch.stack([norm.cpu() for norm in torch._foreach_norm(values, norm_type)])


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    if gradients:
        with torch.no_grad():
            torch._foreach_mul_(list(gradients), factor)


def unscale(gradients: Iterable[Tensor], inverse: float) -> bool:
    """Multiply gradients by the inverse of a scale, in place.

    Returns:
        Whether a gradient was infinite or not a number.

    Raises:
        ValueError: a gradient has half precision, in which a product may be lost.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.dtype is torch.float16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        values = gradient._values() if gradient.is_sparse else gradient
        by_kind.setdefault((values.device, values.dtype), []).append(values)
    found = []
    with torch.no_grad():
        for (device, _), values_of_kind in by_kind.items():
            found.append(torch.zeros((), device=device))
            factor = torch.full((), inverse, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(values_of_kind, found[-1], factor)
    return any(one.item() for one in found)


class Versions:
    """Gradients as they are now, without keeping them alive."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._found = [(weakref.ref(one), one._version) for one in gradients]

    def matches(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether these are the same tensors, and unchanged."""
        return len(gradients) == len(self._found) and all(
            known() is one and version == one._version
            for one, (known, version) in zip(gradients, self._found, strict=True)
        )


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
