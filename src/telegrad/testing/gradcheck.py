"""Comparison of a model spread over workers with the same model in one process.

The local run of the model is the oracle for distributed autograd: outputs and gradients have to agree. On
integer-valued float64 tensors the order of sums does not matter, so there they have to agree bit for bit.
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
from telegrad.worker.default_worker import current_worker

__all__ = ["GradcheckError", "RemotePart", "gradcheck"]

_LARGEST: Final = 2.0**53  # integers below it are exact in float64, and so are their sums

Call = Callable[[RRef[nn.Module], tuple[Any, ...], dict[str, Any]], Any]
Values = dict[str, Tensor | None]


class GradcheckError(AssertionError):
    """Difference of the distributed run from the local one or from another.

    The text has its location and size.

    Example::

        from telegrad.testing import GradcheckError, gradcheck

        try:
            gradcheck(torch.nn.Dropout(), {"": "a"}, [torch.ones(100, requires_grad=True)])
        except GradcheckError as error:
            print(error)
    """


class RemotePart(nn.Module):
    """Substitute for a part of a model that resides on another worker.

    It has no parameters.
    """

    def __init__(self, part: RRef[nn.Module], call: Call) -> None:
        super().__init__()
        self.part = part
        self.call = call

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the part on its worker."""
        return self.call(self.part, args, kwargs)


def gradcheck(
    model: nn.Module,
    placement: Mapping[str, str],
    inputs: Sequence[object],
    *,
    call: Call | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    exact: bool | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    plain: bool = False,
) -> bool:
    """Compare a model placed on workers with itself in one process.

    Compares the outputs and the gradients of every parameter and input.

    The distributed model is run twice, and both runs have to agree bit for bit. Neither may change ``.grad``, unless
    ``plain`` is set. The model itself is not changed: each run has a copy.

    Args:
        model: deterministic; its parts are pickled and sent to their workers. If parts on different workers share a
            parameter, each has a copy, and the sum of the copies' gradients is compared.
        placement: path of a submodule (as in ``model.get_submodule``; "" is the whole model) to the name of the worker
            that runs it. A part may contain other parts. Submodules that are not named run in the caller.
        inputs: arguments of the model. Gradients of floating-point tensors that require them are compared.
        call: calls a part, given its reference, args and kwargs; by default ``rref.rpc_sync().forward``. It is sent
            along with the parts.
        loss: scalar function of the output; by default a sum over all its tensors, weighted by small integers.
        exact: compare bit for bit. None: do so if all inputs, parameters and results are integer-valued float64.
        rtol, atol: otherwise, as for `torch.testing.assert_close`; by default its values for the dtype. A gradient that
            is missing on one side equals zeros on the other.
        plain: run without a context (`telegrad.autograd.plain`), and compare ``.grad``.

    Returns:
        True.

    Raises:
        GradcheckError: the runs differ.
        ValueError: a path of the placement does not exist, or nothing requires a gradient.
        UnknownWorker: a worker of the placement does not exist in the caller's group.

    If the calling code belongs to a group (``init_rpc``), the placement names workers of it. Otherwise a group of the
    named workers and the caller is created in this process, and checked for leaks at the end.

    Example::

        from torch import nn
        from telegrad.testing import gradcheck

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
        run = _run_plain if plain else _run_distributed
        first = run(model, placed, inputs, call or _call_and_wait, loss)
        second = run(model, placed, inputs, call or _call_and_wait, loss)
    _compare("the second distributed run", second, "the first", first, exact=True)
    _compare("the distributed run", first, "the local one", local, exact=exact, rtol=rtol, atol=atol)
    return True


def _call_and_wait(part: RRef[nn.Module], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return part.rpc_sync().forward(*args, **kwargs)


# ---- the two ways to run a model; each returns the values to compare, by name


def _run_local(model: nn.Module, inputs: Sequence[object], loss: Callable[[Any], Tensor] | None) -> Values:
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
    inputs: Sequence[object],
    call: Call,
    loss: Callable[[Any], Tensor] | None,
) -> Values:
    first_names = _first_names(model)
    model, parts = _place(model, placement, call)
    inputs = _copied(inputs)
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
                "the distributed run has put a gradient into .grad of an input; it belongs in the context"
            )
    return _sum_by_name(found, by_name, first_names)


def _run_plain(
    model: nn.Module,
    placement: Mapping[str, str],
    inputs: Sequence[object],
    call: Call,
    loss: Callable[[Any], Tensor] | None,
) -> Values:
    first_names = _first_names(model)
    model, parts = _place(model, placement, call)
    inputs = _copied(inputs)
    with autograd.plain():
        output = model(*inputs)
    _scalar(output, loss).backward()  # type: ignore[no-untyped-call]
    grads = {id(tensor): tensor.grad for tensor in _tensors(inputs)}
    found = _named_outputs(output) | _named_inputs(inputs, grads)
    by_name = _plain_gradients(model)
    for path, rref in parts:
        theirs = rpc.rpc_sync(rref.owner(), _plain_gradients_of_part, args=(rref,))
        by_name |= {f"{path}.{name}" if path else name: grad for name, grad in theirs.items()}
    return _sum_by_name(found, by_name, first_names)


def _place(
    model: nn.Module, placement: Mapping[str, str], call: Call
) -> tuple[nn.Module, list[tuple[str, RRef[nn.Module]]]]:
    """Return a copy of a model with its parts on their workers, and these parts."""
    model = copy.deepcopy(model)
    parts = []
    for path in sorted(placement, key=lambda path: -len(path.split(".")) if path else 1):  # inner parts first
        part = model.get_submodule(path)
        rref = rpc.remote(placement[path], _keep, args=(part,))
        parts.append((path, rref))
        model = _replaced(model, part, RemotePart(rref, call))
    return model, parts


def _sum_by_name(found: Values, by_name: Values, first_names: Mapping[str, str]) -> Values:
    for name, grad in by_name.items():
        key = f"the gradient of parameter {first_names[name]}"
        before = found.get(key)
        found[key] = grad if before is None else before if grad is None else before + grad
    return found


def _plain_gradients_of_part(part: RRef[nn.Module]) -> Values:
    return _plain_gradients(part.local_value())


def _plain_gradients(model: nn.Module) -> Values:
    return {
        name: None if p.grad is None else p.grad.detach() for name, p in model.named_parameters() if p.requires_grad
    }


def _keep(part: nn.Module) -> nn.Module:
    return part


def _gradients_of_part(part: RRef[nn.Module], context: int) -> Values:
    return _gradients_of(part.local_value(), context)


def _gradients_of(model: nn.Module, context: int) -> Values:
    grads = autograd.get_gradients(context)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise GradcheckError(
                f"the distributed run has put a gradient into .grad of {name}; it belongs in the context"
            )
    return {name: grads.get(p) for name, p in model.named_parameters() if p.requires_grad}


def _replaced(model: nn.Module, part: nn.Module, by: nn.Module) -> nn.Module:
    """Return the model with all occurrences of a part replaced."""
    if model is part:
        return by
    for module in list(model.modules()):
        # `named_children` omits the second occurrence in one parent.
        for name, child in list(module._modules.items()):
            if child is part:
                setattr(module, name, by)
    return model


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter, by each of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _check_paths(model: nn.Module, placement: Mapping[str, str]) -> None:
    for path in placement:
        try:
            model.get_submodule(path)
        except AttributeError as e:
            raise ValueError(f"the placement names {path!r}, but the model has no such part: {e}") from e


# ---- values


def _copied(inputs: Sequence[object]) -> list[object]:
    return [
        i.detach().clone().requires_grad_(i.requires_grad) if isinstance(i, Tensor) else copy.deepcopy(i)
        for i in inputs
    ]


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _named_outputs(output: object) -> Values:
    return {f"output {i}": t.detach() for i, t in enumerate(_tensors(output))}


def _named_inputs(inputs: Sequence[object], grads: Mapping[int, Tensor | None]) -> Values:
    tensors = enumerate(_tensors(inputs))
    return {f"the gradient of input {i}": grads.get(id(t)) for i, t in tensors if t.requires_grad}


def _scalar(output: object, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """Return the scalar to differentiate.

    The weights distinguish entries: with ones, a gradient of the wrong entry could go unnoticed.
    """
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
