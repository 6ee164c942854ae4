"""Is a model that is spread over workers the same function, with the same gradients, as in one process?

The oracle for distributed autograd: the local run of the same model. On integer-valued float64 the order of sums does
not matter, so there the two have to agree bit for bit.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.rref import RRef
from telegrad.testing.clusters import cluster
from telegrad.worker.default import current_worker

__all__ = ["GradcheckError", "RemotePart", "gradcheck"]

_CALLER: Final = "caller"
_LARGEST: Final = 2.0**53  # integers below it are exact in float64, and so are their sums

Call = Callable[[RRef[nn.Module], tuple[Any, ...], dict[str, Any]], Any]
Values = dict[str, Tensor | None]


class GradcheckError(AssertionError):
    """The distributed run differs from the local one, or from another distributed one. Says where and by how much."""


class RemotePart(nn.Module):
    """Stands for a part of a model that lives on another worker. It has no parameters of its own."""

    def __init__(self, part: RRef[nn.Module], call: Call) -> None:
        super().__init__()
        self.part = part
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the part where it lives."""
        return self.call(self.part, args, kwargs)


def gradcheck(
    model: nn.Module,
    placement: Mapping[str, str],
    inputs: Sequence[Any],
    *,
    call: Call | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    exact: bool | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> bool:
    """Compares a model, its parts placed on workers, with itself in one process: outputs, and the gradients of every
    parameter and input.

    The distributed model is run twice, and both runs have to agree bit for bit. Neither may touch ``.grad``. The model
    itself is not changed: each run has a copy.

    Args:
        model: deterministic; its parts are pickled to their workers. Parts on different workers cannot share a
            parameter: each has a copy then, and the sum of the copies' gradients is compared.
        placement: path of a submodule (as in ``model.get_submodule``; "" is the model as a whole) to the name of the
            worker that runs it. A part may contain other parts. What is not named runs in the caller.
        inputs: what the model is called with. Floating-point tensors that require gradients are compared.
        call: how a part is called, given its reference, args and kwargs: by default ``rref.rpc_sync().forward``. It
            travels with the parts.
        loss: of the output, a scalar; by default a sum over all its tensors, weighted by small integers.
        exact: compare bit for bit. None: if everything, inputs, parameters and results, is integer-valued float64.
        rtol, atol: else, as for `torch.testing.assert_close`; by default what it takes for the dtype. A gradient that
            is missing on one side equals zeros on the other.

    Returns:
        True.

    Raises:
        GradcheckError: there is a difference.
        ValueError: a path or worker of the placement does not exist, or nothing requires a gradient.

    If the calling code belongs to a group (``init_rpc``), the placement names workers of it. Otherwise a group of the
    workers that it names is made in this process, with the caller besides, and checked for leaks at the end.

    Example::

        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        assert gradcheck(model, {"0": "a", "2": "b"}, [torch.randn(3, 4, requires_grad=True)])
    """
    _check_paths(model, placement)
    local = _run_local(model, inputs, loss)
    if exact is None:
        exact = all(
            _is_integral(t) for t in (*_tensors(list(inputs)), *model.parameters(), *local.values()) if t is not None
        )
    with ExitStack() as stack:
        if current_worker() is None:
            names = sorted(set(placement.values()))
            group = stack.enter_context(cluster(len(names) + 1))
            workers = {name: group[rank + 1].info.name for rank, name in enumerate(names)}
        else:
            workers = {name: name for name in placement.values()}
        placed = {path: workers[name] for path, name in placement.items()}
        first = _run_distributed(model, placed, inputs, call or _call_and_wait, loss)
        second = _run_distributed(model, placed, inputs, call or _call_and_wait, loss)
    _compare("the second distributed run", second, "the first", first, exact=True)
    _compare("the distributed run", first, "the local one", local, exact=exact, rtol=rtol, atol=atol)
    return True


def _call_and_wait(part: RRef[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return part.rpc_sync().forward(*args, **kwargs)


# ---- the two ways to run a model; each gives what is compared, by name


def _run_local(model: nn.Module, inputs: Sequence[Any], loss: Callable[[Any], Tensor] | None) -> Values:
    model = copy.deepcopy(model)
    names = {id(p): name for name, p in model.named_parameters()}
    inputs = _copied(inputs)
    output = model(*inputs)
    wanted = [*(t for t in _tensors(inputs) if t.requires_grad), *(p for p in model.parameters() if p.requires_grad)]
    if not wanted:
        raise ValueError("neither the inputs nor the model's parameters require gradients: there is nothing to compare")
    grads = torch.autograd.grad(_scalar(output, loss), wanted, allow_unused=True)
    found = _named_outputs(output) | _named_inputs(inputs, {id(t): g for t, g in zip(wanted, grads, strict=True)})
    for tensor, grad in zip(wanted, grads, strict=True):
        if id(tensor) in names:
            found[f"the gradient of parameter {names[id(tensor)]}"] = grad
    return found


def _run_distributed(
    model: nn.Module,
    placement: Mapping[str, str],
    inputs: Sequence[Any],
    call: Call,
    loss: Callable[[Any], Tensor] | None,
) -> Values:
    first_names = _first_names(model)
    model = copy.deepcopy(model)
    inputs = _copied(inputs)
    parts = []
    for path in sorted(placement, key=lambda path: -len(path.split(".")) if path else 1):  # inner ones first
        part = model.get_submodule(path)
        rref = rpc.remote(placement[path], _keep, args=(part,))
        parts.append((path, rref))
        model = _replaced(model, part, RemotePart(rref, call))
    with autograd.context() as context:
        output = model(*inputs)
        autograd.backward(context, [_scalar(output, loss)])
        grads = autograd.get_gradients(context)
        found = _named_outputs(output) | _named_inputs(inputs, {id(t): g for t, g in grads.items()})
        by_name = _gradients_of(model, context)
        for path, rref in parts:
            theirs = rpc.rpc_sync(rref.owner(), _gradients_of_part, args=(rref, context))
            by_name |= {f"{path}.{name}" if path else name: grad for name, grad in theirs.items()}
    for tensor in _tensors(inputs):
        if tensor.grad is not None:
            raise GradcheckError(
                "the distributed run has put a gradient into .grad of an input; it belongs into the context"
            )
    for name, grad in by_name.items():
        key = f"the gradient of parameter {first_names[name]}"
        before = found.get(key)
        found[key] = grad if before is None else before if grad is None else before + grad
    return found


def _keep(part: nn.Module) -> nn.Module:
    return part


def _gradients_of_part(part: RRef[nn.Module], context: int) -> Values:
    return _gradients_of(part.local_value(), context)


def _gradients_of(model: nn.Module, context: int) -> Values:
    grads = autograd.get_gradients(context)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise GradcheckError(
                f"the distributed run has put a gradient into .grad of {name}; it belongs into the context"
            )
    return {name: grads.get(p) for name, p in model.named_parameters() if p.requires_grad}


def _replaced(model: nn.Module, part: nn.Module, by: nn.Module) -> nn.Module:
    """The model with a part replaced wherever it stands."""
    if model is part:
        return by
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child is part:
                setattr(module, name, by)
    return model


def _first_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter the first one that it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _check_paths(model: nn.Module, placement: Mapping[str, str]) -> None:
    for path in placement:
        try:
            model.get_submodule(path)
        except AttributeError as e:
            raise ValueError(f"the placement names {path!r}, but the model has no such part: {e}") from e


# ---- values


def _copied(inputs: Sequence[Any]) -> list[Any]:
    return [
        i.detach().clone().requires_grad_(i.requires_grad) if isinstance(i, Tensor) else copy.deepcopy(i)
        for i in inputs
    ]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _named_outputs(output: Any) -> Values:
    return {f"output {i}": t.detach() for i, t in enumerate(_tensors(output))}


def _named_inputs(inputs: Sequence[Any], grads: Mapping[int, Tensor | None]) -> Values:
    tensors = enumerate(_tensors(inputs))
    return {f"the gradient of input {i}": grads.get(id(t)) for i, t in tensors if t.requires_grad}


def _scalar(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """What is differentiated. The weights tell entries apart: with ones, a gradient that went to the wrong one could
    stay unseen."""
    if loss is not None:
        return loss(output)
    total: Tensor | None = None
    for tensor in _tensors(output):
        if not tensor.requires_grad:
            continue
        weights = (torch.arange(tensor.numel(), device=tensor.device) % 5 - 2).reshape(tensor.shape)
        term = (tensor * weights.to(tensor.dtype)).sum()
        term = term.real if term.is_complex() else term
        total = term if total is None else total + term
    if total is None:
        raise ValueError("no tensor of the model's output requires a gradient")
    return total


def _is_integral(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return not tensor.is_complex()
    values = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return tensor.dtype == torch.float64 and bool(((values == values.round()) & (values.abs() < _LARGEST)).all())


def _compare(
    what: str,
    got: Values,
    which: str,
    want: Values,
    *,
    exact: bool,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    for name in sorted(got.keys() | want.keys()):
        ours, theirs = got.get(name), want.get(name)
        if ours is None and theirs is None:
            continue
        ours = torch.zeros_like(theirs) if ours is None and theirs is not None else ours
        theirs = torch.zeros_like(ours) if theirs is None and ours is not None else theirs
        assert ours is not None
        assert theirs is not None
        limits = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": rtol, "atol": atol}
        try:
            torch.testing.assert_close(_dense(ours), _dense(theirs), equal_nan=True, **limits)
        except AssertionError as e:
            raise GradcheckError(f"{name} of {what} is not that of {which}: {e}") from None


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.layout != torch.strided else tensor
