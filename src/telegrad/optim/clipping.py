"""Clipping of gradients by their norm over all workers."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from telegrad.autograd.api import _is_valid_context
from telegrad.optim import owner as on_owner
from telegrad.optim.ask import Request, ask
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.rref import RRef

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: DistributedOptimizer | RRef[Tensor] | Iterable[RRef[Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    context_id: int | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the norm of gradients on all workers, as if they were one vector.

    As with torch's function of this name, the gradients are clipped when it returns. It takes one round trip, in which
    the owners return the norms of their gradients, and a second one only if the norm is too large.

    Args:
        parameters: an optimizer, for all its parameters; or references to parameters on any workers.
        max_norm: limit of the norm.
        norm_type: order of the norm; ``float("inf")`` for the largest absolute value.
        context_id: an autograd context, for its gradients; None for the `.grad` of the parameters.
        error_if_nonfinite: raise an error if the norm is infinite or not a number. Otherwise such a norm makes the
            gradients zero or not a number, as in torch.

    Returns:
        The norm before clipping, equal to that of ``torch.nn.utils.clip_grad_norm_`` for the same parameters in one
        process; 0 without gradients.

    Raises:
        RuntimeError: "Could not find autograd context with id: ..."; the norm is not finite, with
            `error_if_nonfinite`; or an owner is lost.

    Example::

        module = RemoteModule("worker1/cpu", torch.nn.Linear, (20, 1))
        optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.05)
        with autograd.context() as context_id:
            autograd.backward(context_id, [module(torch.ones(8, 20)).sum()])
            norm = optim.clip_grad_norm_(optimizer, max_norm=1.0, context_id=context_id)
            optimizer.step(context_id)
    """
    norm_type = float(norm_type)
    if context_id is not None:
        _is_valid_context(context_id)
    if isinstance(parameters, DistributedOptimizer):
        norms = parameters._norms(context_id, norm_type)
        places: dict[int, list[int]] = {}
        references: Sequence[RRef[Tensor]] = []
    else:
        references = [parameters] if isinstance(parameters, RRef) else list(parameters)
        places = _places(references)
        norms = _norms(references, places, context_id, norm_type)
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm for _, norm in sorted(norms, key=lambda n: n[0])]), norm_type
    )
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be"
            " clipped. To disable this error and scale the gradients by the non-finite norm anyway, set"
            " `error_if_nonfinite=False`"
        )
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0).item()
    if factor == 1.0:
        return total
    if isinstance(parameters, DistributedOptimizer):
        parameters._scale(context_id, factor)
    else:
        function = on_owner.scale_references
        of = {owner: [references[place] for place in theirs] for owner, theirs in places.items()}
        ask(
            "clip_grad_norm_",
            {one: Request(function, (theirs, context_id, factor)) for one, theirs in of.items()},
        )
    return total


def _places(references: Sequence[RRef[Tensor]]) -> dict[int, list[int]]:
    """Return the places of each owner's references."""
    places: dict[int, list[int]] = {}
    for place, reference in enumerate(references):
        if not isinstance(reference, RRef):
            raise TypeError(
                f"clip_grad_norm_ takes a DistributedOptimizer or RRefs to parameters, but got a"
                f" {type(reference).__name__}. For a parameter of this worker, pass RRef(parameter)."
            )
        places.setdefault(reference.owner_id, []).append(place)
    return places


def _norms(
    references: Sequence[RRef[Tensor]], places: dict[int, list[int]], context_id: int | None, norm_type: float
) -> list[tuple[int, Tensor]]:
    function = on_owner.norms_of_references
    of = {owner: [references[place] for place in theirs] for owner, theirs in places.items()}
    requests = {owner: Request(function, (theirs, context_id, norm_type)) for owner, theirs in of.items()}
    found: list[tuple[int, Tensor]] = []
    for theirs, (numbers, norms) in zip(places.values(), ask("clip_grad_norm_", requests), strict=True):
        found += [(theirs[number], norms[at]) for at, number in enumerate(numbers)]
    return found
