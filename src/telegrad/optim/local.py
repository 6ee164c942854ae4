"""A worker's part of a distributed optimizer.

It is an ordinary optimizer over the worker's parameters. Instead of each parameter it has a *shadow* of it, a leaf of
the same kind that has memory only during a step:

- the parameter's own memory, if nothing else refers to it and no handler runs: the step then works in place without a
  copy, as a local step does;
- otherwise a copy, which replaces the parameter's memory after the step; saved tensors keep the old memory.

So the parameter's `.grad` never changes, and an optimizer that fails half-way leaves parameters with a copy unchanged.
A step becomes visible all at once, under the worker's step lock (`telegrad.autograd.consistency.step_gate`). Only
torch's own optimizers have known code: they work in place and under the lock. Others work on copies, before the lock is
taken.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from telegrad.autograd.consistency import saved_tensors
from telegrad.autograd.consistency.saved_tensors import new_chain, protect
from telegrad.autograd.consistency.step_gate import StepGate, warn_if_overtaken
from telegrad.errors import NotInitialized
from telegrad.optim.gradients import Versions, gradients_of
from telegrad.optim.parameters import ManagedParameter, locked_in_order, managed, sorted_for_locking
from telegrad.worker.default_worker import current_worker
from telegrad.worker.scope import current_chain

__all__ = ["Group", "LocalOptimizer", "between_steps"]

Group = tuple[dict[str, Any], list[Tensor], list[str] | None]  # options, parameters, and their names if any

_NOT_A_LEAF = "can't optimize a non-leaf Tensor"


class LocalOptimizer:
    """Optimizer of one owner's parameters.

    Args:
        worker: the `telegrad.worker.Worker` that owns the parameters.
        optimizer_class: creates the optimizer from the shadows (a list, or a list of groups) and the arguments.
        groups: the parameters, leaf tensors.
        grouped: pass groups to the optimizer instead of a list.
        args, kwargs: its further arguments.

    Attributes:
        optimizer: the ordinary optimizer, of the shadows.
        parameters: in the order of the groups; a parameter's index is its id in the optimizer's state.

    Raises:
        ValueError: one of the parameters is not a leaf, or two share memory.
        TypeError: the optimizer has a `step` with arguments that it needs.
        errors of the optimizer's constructor.
    """

    def __init__(
        self,
        worker: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        groups: Sequence[Group],
        grouped: bool,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> None:
        self.parameters: list[Tensor] = [parameter for _, members, _ in groups for parameter in members]
        _check(self.parameters)
        self._worker = worker
        self._last_add: tuple[str, int, list[Tensor]] = "", 0, []  # attempt; groups and parameters before it
        # Attempt and context, gradients, and result of the last `unscale`.
        self.unscaled: tuple[tuple[str, int | None], Versions, bool] | None = None
        self._undone: set[str] = set()  # attempts that were undone before they arrived
        self._shadow_of: dict[int, Tensor] = {id(parameter): _shadow(parameter) for parameter in self.parameters}
        given: list[object] = []
        for group in groups:
            of_group = self._given(group)
            given.extend([of_group] if grouped else of_group["params"])
        self.optimizer: torch.optim.Optimizer = optimizer_class(given, *args, **kwargs)
        _check_step(self.optimizer)
        self._known = type(self.optimizer).__module__.split(".")[:2] == ["torch", "optim"]
        self._manage()
        self._vacate()

    def _given(self, group: Group) -> dict[str, Any]:
        """Return a group as the optimizer takes it."""
        options, members, names = group
        shadows: list[Any] = [self._shadow_of[id(parameter)] for parameter in members]
        return {**options, "params": shadows if names is None else list(zip(names, shadows, strict=True))}

    def _manage(self) -> None:
        unique = list({id(parameter): parameter for parameter in self.parameters}.values())
        self._managed = managed(self._worker, unique)
        self._in_turn = sorted_for_locking(self._managed)
        self._shadows: list[Tensor] = [self._shadow_of[id(parameter)] for parameter in unique]
        self._vacant = [_no_data(parameter) for parameter in unique]

    def add_group(self, group: Group, attempt: str = "", timeout: float = -1.0) -> None:
        """Add a parameter group. After an error there is no such group.

        Args:
            group: the group.
            attempt: a unique text, for `undo_add`.
            timeout: seconds to wait for steps of other optimizers; -1 is no limit.

        Raises:
            TimeoutError: another optimizer is still stepping one of the parameters.
            ValueError: one of its parameters is not a leaf, shares memory with another, or is in a group already.
            RuntimeError: the attempt has been undone.
            errors of the optimizer.
        """
        members = group[1]
        with self.exclusive(timeout):
            if attempt in self._undone:
                self._undone.remove(attempt)
                raise RuntimeError("adding this parameter group has failed on another worker, and was undone")
            self._last_add = attempt, len(self.optimizer.param_groups), self.parameters
            try:
                _check([*self.parameters, *members])
                shadows = {id(parameter): _shadow(parameter) for parameter in members}
                self._shadow_of = {**shadows, **self._shadow_of}
                self.optimizer.add_param_group(self._given(group))
                self.parameters = [*self.parameters, *members]
                self._manage()
                self._vacate()
            except BaseException:
                self._remove_last()
                raise

    def undo_add(self, attempt: str, timeout: float = -1.0) -> None:
        """Remove the group that an attempt has added, or will add if it arrives later.

        May be called again, and if the attempt has failed.

        Args:
            attempt: see `add_group`.
            timeout: seconds to wait for steps of other optimizers; -1 is no limit.

        Raises:
            TimeoutError: another optimizer is still stepping one of the parameters.
        """
        with self.exclusive(timeout):
            if self._last_add[0] == attempt:
                self._remove_last()
            else:
                self._undone.add(attempt)

    def _remove_last(self) -> None:
        """Restore the groups from before the last attempt to add one."""
        _, count, self.parameters = self._last_add
        del self.optimizer.param_groups[count:]
        before = self._shadow_of
        self._shadow_of = {id(parameter): before[id(parameter)] for parameter in self.parameters}
        for key in before.keys() - self._shadow_of.keys():
            self.optimizer.state.pop(before[key], None)
        self._manage()
        self._vacate()

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a state of the optimizer.

        It gets the data types and devices that the parameters have now.
        """
        self._vacant = [_no_data(one.parameter) for one in self._managed]
        self._vacate()
        self.optimizer.load_state_dict(state)

    @property
    def optim(self) -> torch.optim.Optimizer:
        """Return the optimizer, under torch's name for it."""
        return self.optimizer

    @contextmanager
    def exclusive(self, timeout: float = -1.0, chain: int = 0) -> Iterator[None]:
        """Return a context manager in which no optimizer steps the parameters.

        Args:
            timeout: seconds to wait for steps of other optimizers; -1 is no limit.
            chain: the call chain that waits; that of the running code by default.

        Raises:
            TimeoutError: another optimizer is still stepping one of the parameters.
        """
        with ExitStack() as stack:
            # A step that this code waits for must not wait for the handler that this code belongs to.
            with protect(self._worker).gate.blocked(chain or current_chain()):
                stack.enter_context(locked_in_order(self._in_turn, timeout))
            yield

    def step(
        self,
        context: int | None,
        gradients: dict[Tensor, Tensor] | None = None,
        timeout: float = -1.0,
        chain: int = 0,
    ) -> None:
        """Step the parameters once.

        Args:
            context: id of the autograd context; None steps with the parameters' `.grad`, and waits for all handlers
                except those of its call chain.
            gradients: by parameter; those of the context on this worker by default.
            timeout: seconds to wait for steps of other optimizers of the same parameters; -1 is no limit.
            chain: the call chain of a step without a context; that of the running code by default.

        Raises:
            TimeoutError: another optimizer is still stepping one of the parameters.
            errors of the optimizer.
        """
        with self.exclusive(timeout, chain), torch.inference_mode(False):
            if gradients is None:
                gradients = self.gradients(context)
            try:
                if context is None:
                    context = chain or current_chain() or new_chain(self._worker.info.id)
                self._step(protect(self._worker).gate, context, gradients)
            finally:
                self._vacate()

    def gradients(self, context: int | None) -> dict[Tensor, Tensor]:
        """Return the gradients on this worker, which may have none; see `step`."""
        return gradients_of(self._worker, context, self.parameters)

    def _step(self, gate: StepGate, context: int, gradients: dict[Tensor, Tensor]) -> None:
        on_copies: list[tuple[ManagedParameter, Tensor]] = []
        in_place: list[tuple[ManagedParameter, Tensor]] = []
        given: list[tuple[Tensor, Tensor]] = []
        for one, shadow in zip(self._managed, self._shadows, strict=True):
            gradient = gradients.get(one.parameter)
            if gradient is not None:
                given.append((shadow, gradient))
            elif self._known:
                continue  # torch's optimizers skip shadows without a gradient
            if self._known and (one.shared or not one.in_use()):
                in_place.append((one, shadow))
            else:
                shadow.data = one.copy()
                on_copies.append((one, shadow))
        if not in_place:
            self._run(given)
            with gate.step(context) as step:
                _put(on_copies)
            warn_if_overtaken(step, context)
            return
        with gate.step(context) as step:
            written = []
            for one, shadow in in_place:
                if one.shared or (step.unread and not one.in_use()):
                    shadow.data = one.parameter.data
                    written.append(one)
                else:
                    shadow.data = one.copy()
                    on_copies.append((one, shadow))
            try:
                self._run(given)
            finally:
                for one in written:
                    one.written()
            _put(on_copies)
        warn_if_overtaken(step, context)

    def _run(self, given: list[tuple[Tensor, Tensor]]) -> None:
        for shadow, gradient in given:
            shadow.grad = gradient
        self.optimizer.step()

    def _vacate(self) -> None:
        """Release the memory and the gradients of all shadows.

        Shadows have neither between steps.
        """
        for shadow, nothing in zip(self._shadows, self._vacant, strict=True):
            shadow.grad = None
            shadow.data = nothing


def between_steps() -> AbstractContextManager[None]:
    """Return a context manager that holds off steps of this worker's parameters.

    It holds off every `DistributedOptimizer`, as handlers that run in a context do: for evaluation, or to read all
    parameters at one moment. Steps wait meanwhile, so keep it short. A step that has waited for 20 s takes effect
    nevertheless (docs/optim.md). A step within the block, on the same thread, does not wait.

    Raises:
        RuntimeError: this process has not joined a group.

    Example::

        def evaluate(module):  # runs on worker1, which owns the parameters
            with optim.between_steps():
                return module.local_value()(torch.ones(20)).item()

        module = rpc.remote("worker1", torch.nn.Linear, args=(20, 1))
        rpc.rpc_sync("worker1", evaluate, args=(module,))
    """
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    return saved_tensors.between_steps(worker)


def _no_data(parameter: Tensor) -> Tensor:
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _put(stepped: list[tuple[ManagedParameter, Tensor]]) -> None:
    for one, shadow in stepped:
        one.swap_storage(shadow.data)


def _shadow(parameter: Tensor) -> Tensor:
    data = parameter.data
    shadow: Tensor
    if isinstance(parameter, nn.Parameter):
        shadow = nn.Parameter(data, requires_grad=parameter.requires_grad)
    else:
        shadow = data.requires_grad_(parameter.requires_grad)
    shadow.__dict__.update(parameter.__dict__)  # some optimizers read attributes that programs set on parameters
    return shadow


def _check(parameters: Sequence[Tensor]) -> None:
    taken: dict[int, list[tuple[int, int, Tensor]]] = {}
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"optimizer can only optimize Tensors, but one of the params is {type(parameter)}")
        if not parameter.is_leaf:
            raise ValueError(_NOT_A_LEAF)
        if parameter.layout is not torch.strided or not parameter.numel() or parameter.device.type == "meta":
            continue
        start = parameter.data_ptr()
        span = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)) + 1
        others = taken.setdefault(parameter.untyped_storage()._cdata, [])
        end = start + span * parameter.element_size()
        if any(start < e and s < end and other is not parameter for s, e, other in others):
            raise ValueError(
                f"two parameters, one of shape {list(parameter.shape)}, share memory. A step may move a parameter to"
                " other memory, and they would no longer share it: use one nn.Parameter for both."
            )
        others.append((start, end, parameter))


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Check that `step` can be called without arguments."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
    if needed:
        raise TypeError(
            f"{type(optimizer).__name__} has a step that needs {', '.join(needed)}: DistributedOptimizer takes every"
            " class of torch.optim, and any class with that interface, except those with a step that needs a closure"
            " (LBFGS)"
        )
