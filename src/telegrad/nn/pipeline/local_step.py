"""Step of a pipeline at one stage: its inputs, saved graphs and results."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from telegrad.nn.owner import moved
from telegrad.nn.pipeline.micro_batches import Values, as_values
from telegrad.nn.pipeline.schedule import Order, Pass, PassKind
from telegrad.worker.scope import Autocast, Scope, handler_state

__all__ = ["Input", "LocalStep", "LossFunction", "Outgoing", "Plan", "run_backward"]

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""Function of a micro-batch's result and target that returns a scalar."""

_CPU = torch.device("cpu")


class Plan(NamedTuple):
    """Facts of a step that every message of the step carries.

    They include torch's state for the passes: the messages themselves have the default state, since a neighbor sends
    them from whatever thread has run a pass.
    """

    number: int  # of the step, increasing
    training: bool
    keep_outputs: bool  # the last stage returns what its module returned
    micro_batches: int
    autocast: Autocast = None  # of the step's caller, for the forward passes and the loss


class Input(NamedTuple):
    """Arguments of a micro-batch's forward pass."""

    values: Values
    needs_gradient: tuple[bool, ...]


class Outgoing(NamedTuple):
    """Result of a pass for a neighbor: an `Input`, or the gradients of one."""

    values: Values
    needs_gradient: tuple[bool, ...] = ()


class _Saved(NamedTuple):
    """Ends of a micro-batch's graph, from its forward to its backward pass."""

    inputs: Values
    result: object


class LocalStep:
    """Passes of one step at one stage.

    One thread at a time runs passes; `PipelineStage` sees to that, and guards the inbox.

    Args:
        plan: the step.
        order: the passes that this stage runs.
        device: of the module.
        scope: for the calls that the passes make.
    """

    def __init__(self, plan: Plan, order: Order, device: torch.device, scope: Scope) -> None:
        self.plan: Plan = plan
        self.order: Order = order
        self.device = device
        self.scope: Scope = scope
        self.position: int = 0  # of the next pass in the order
        self.dropped: bool = False
        self.error: BaseException | None = None
        # The inbox: by micro-batch, inputs and gradients of results. The last stage has targets instead of gradients.
        self.inputs: dict[int, Input] = {}
        self.gradients: dict[int, Values] = {}
        self.targets: list[object] | None = None
        self.weights: list[float] = []  # of the losses of micro-batches
        self.scale: Tensor | None = None  # of the losses in backward passes, for mixed precision
        # What passes leave behind.
        self.saved: dict[int, _Saved] = {}
        self.times: list[tuple[int, int, float, float]] = []
        self.losses: list[Tensor] = []
        self.outputs: list[object] = []
        self.input_gradients: list[Values] = []

    @property
    def is_complete(self) -> bool:
        """Whether all passes have run."""
        return self.position == len(self.order)

    def next_ready(self, is_last: bool) -> Pass | None:
        """Return the next pass if its input has arrived."""
        if self.is_complete:
            return None
        one = self.order[self.position]
        if one.kind == PassKind.FORWARD:
            return one if one.micro_batch in self.inputs else None
        if is_last:
            return one if self.targets is not None else None
        return one if one.micro_batch in self.gradients else None

    def drop(self) -> list[object]:
        """Mark the step as ended; return what it held, to be released outside of locks."""
        self.dropped = True
        held: list[object] = [self.inputs, self.gradients, self.saved, self.targets, self.outputs]
        held += [self.losses, self.input_gradients]
        self.inputs, self.gradients, self.saved, self.targets = {}, {}, {}, None
        self.losses, self.outputs, self.input_gradients = [], [], []
        return held

    # ---- passes

    def forward(self, module: nn.Module, i: int, is_last: bool) -> Outgoing:
        """Run the module; return its results for the next stage."""
        given = self.inputs.pop(i)
        training = self.plan.training
        inputs = _leaves(given, self.device) if training else moved(given.values, self.device)
        begin = time.monotonic()
        with handler_state(0, self.plan.autocast), torch.set_grad_enabled(training):
            result = module(*inputs)
        self._note(PassKind.FORWARD, i, begin)
        if training:
            self.saved[i] = _Saved(inputs, result)
        if is_last:
            if self.plan.keep_outputs:
                kept = tuple(map(_detached, as_values(result)))
                self.outputs.append(kept if isinstance(result, (tuple, list)) else kept[0])
            return Outgoing(())
        values = as_values(result)
        return Outgoing(
            tuple(map(_detached, values)),
            tuple(training and isinstance(value, Tensor) and value.requires_grad for value in values),
        )

    def backward(self, i: int, loss_fn: LossFunction | None) -> Outgoing:
        """Run a backward pass; return the gradients of the inputs.

        Args:
            i: the micro-batch.
            loss_fn: at the last stage only.
        """
        saved = self.saved.pop(i)
        if loss_fn is None:
            gradients = self.gradients.pop(i)
            begin = time.monotonic()
            run_backward(as_values(saved.result), gradients)
        else:
            assert self.targets is not None
            target, self.targets[i] = moved(self.targets[i], self.device), None
            begin = time.monotonic()
            with handler_state(0, self.plan.autocast), torch.enable_grad():
                try:
                    loss = _checked_loss(loss_fn(saved.result, target)) * self.weights[i]
                except Exception as e:
                    if target is None:
                        e.add_note("loss_fn got the target None: pass target= to the pipeline's step")
                    raise
            torch.autograd.backward([loss if self.scale is None else loss * self.scale.to(loss.device)])
            self.losses.append(_detached(loss))
        self._note(PassKind.BACKWARD, i, begin)
        return Outgoing(tuple(_gradient_of(value) for value in saved.inputs))

    def _note(self, kind: PassKind, i: int, begin: float) -> None:
        self.times.append((int(kind), i, begin, time.monotonic()))


def run_backward(values: Sequence[object], gradients: Sequence[object]) -> None:
    """Run torch's backward pass from the values that have a gradient."""
    roots, given = [], []
    for value, gradient in zip(values, gradients, strict=True):
        if isinstance(value, Tensor) and isinstance(gradient, Tensor):
            roots.append(value)
            given.append(gradient.to(value.device))
    if roots:
        torch.autograd.backward(roots, given)


def _leaves(given: Input, device: torch.device) -> Values:
    """Return the inputs of a forward pass, as leaves where a gradient is needed."""
    return tuple(
        value.to(device).detach().requires_grad_() if needs and isinstance(value, Tensor) else moved(value, device)
        for value, needs in zip(given.values, given.needs_gradient, strict=True)
    )


def _detached(value: Any) -> Any:
    return value.detach().to(_CPU) if isinstance(value, Tensor) else value


def _gradient_of(value: object) -> Tensor | None:
    if not isinstance(value, Tensor) or value.grad is None:
        return None
    return value.grad.to(_CPU)


def _checked_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn of a pipeline has to return a tensor with one element, not {shape}")
    return loss
