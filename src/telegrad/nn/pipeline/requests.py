"""Functions that run on the owner of a stage.

Each takes the two numbers of a reference to the stage, which the pipeline holds: calls with a reference itself would
take the slow path, and references between neighbors would never be released.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from torch import Tensor, nn

from telegrad.nn.pipeline.local_step import LossFunction, Outgoing, Plan
from telegrad.nn.pipeline.micro_batches import Values, split, split_target
from telegrad.nn.pipeline.stage import PipelineStage, StageConfig
from telegrad.protocols.rref import RRefId
from telegrad.rref import RRef
from telegrad.worker import Worker
from telegrad.worker.calls.callables import callee_of
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.operation_timeouts import of_operation
from telegrad.worker.default_worker import open_worker
from telegrad.worker.scope import Autocast

__all__ = [
    "Address",
    "connect",
    "drop_step",
    "feed",
    "feed_targets",
    "make_stage",
    "operation_of",
    "reset_gradients",
    "run_step",
]

Address: TypeAlias = tuple[int, int, int]
"""Owner of a stage, and the two numbers of the reference."""

PlanItems: TypeAlias = tuple[int, bool, bool, int, Autocast]
"""Fields of a `Plan`."""


_OF_NEIGHBORS: Final = ("accept_inputs", "accept_gradients")


def operation_of(training: bool) -> str:
    """Return the method of `Pipeline` that runs a plan, as errors name it."""
    return "Pipeline.step" if training else "Pipeline.forward"


def _stage(created_on: int, local_id: int) -> PipelineStage:
    stage = open_worker().references.owned(RRefId(created_on, local_id)).get()
    if not isinstance(stage, PipelineStage):  # else its methods would be called past an allow-list
        raise TypeError(f"the reference of a stage refers to a {type(stage).__qualname__}")
    return stage


async def make_stage(
    module: RRef[nn.Module], config: tuple[int, int, str, str], loss_fn: bytes | LossFunction | None
) -> RRef[PipelineStage]:
    """Create a stage once its module exists.

    Args:
        module: the module.
        config: the first fields of a `StageConfig`.
        loss_fn: of the last stage, for training: a function, or its name in messages.
    """
    loss = None if loss_fn is None else callee_of(loss_fn)
    value, exposure = await module, module.worker.handlers.exposure
    exposure.method_of(value, "__call__")  # the stage calls it, and resets its gradients
    exposure.method_of_module(value, "zero_grad")
    _check_forward(value, config[0])
    return RRef(PipelineStage(value, StageConfig(*config, loss), module.owner_name()))


def _check_forward(module: nn.Module, number: int) -> None:
    """Check that the module's `forward` returns its results."""
    function = inspect.getattr_static(module, "forward", None)
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(function) for kind in kinds):
        raise TypeError(
            f"stage {number} of a pipeline has a {type(module).__qualname__}, with a forward that is a generator or"
            " async: a stage has to return tensors from an ordinary function"
        )


def connect(created_on: int, local_id: int, before: Address | None, after: Address | None) -> None:
    """Set the neighbors of a stage."""
    stage, worker = _stage(created_on, local_id), open_worker()
    stage.connect(
        None if after is None else _sender(worker, stage, after, accept_inputs),
        None if before is None else _sender(worker, stage, before, accept_gradients),
    )


def _sender(
    worker: Worker, stage: PipelineStage, to: Address, function: Callable[..., None]
) -> Callable[[Plan, int, Outgoing], None]:
    """Return the function that sends results of passes to a neighbor."""
    owner, *ids = to
    fail = stage.fail

    def send(plan: Plan, i: int, result: Outgoing) -> None:
        # No limit of its own: the receiver replies after running passes. The deadline of the step applies.
        future = worker.rpc_async(owner, function, (*ids, tuple(plan), i, *result), timeout=0)

        def completed(done: CallFuture[None]) -> None:
            done._mark_read()
            error = done.failure()
            if error is not None:
                fail(plan, of_operation(error, _OF_NEIGHBORS, operation_of(plan.training), plan.training))

        future._on_done(completed)

    return send


# ---- messages of neighbors


def accept_inputs(
    created_on: int,
    local_id: int,
    plan: PlanItems,
    i: int,
    values: Values,
    needs_gradient: tuple[bool, ...],
) -> None:
    """Add the arguments of a micro-batch, from the previous stage."""
    _stage(created_on, local_id).add_inputs(Plan(*plan), i, [values], needs_gradient)


def accept_gradients(
    created_on: int,
    local_id: int,
    plan: PlanItems,
    i: int,
    gradients: Values,
    _: tuple[bool, ...],
) -> None:
    """Add the gradients of a micro-batch's results, from the next stage."""
    _stage(created_on, local_id).add_gradients(Plan(*plan), i, gradients)


# ---- messages of the pipeline


def feed(
    created_on: int,
    local_id: int,
    plan: PlanItems,
    values: Values,
    needs_gradient: tuple[bool, ...],
    sizes: Sequence[int],
) -> None:
    """Give the first stage a batch."""
    _stage(created_on, local_id).add_inputs(Plan(*plan), 0, split(values, sizes), needs_gradient)


def feed_targets(
    created_on: int,
    local_id: int,
    plan: PlanItems,
    target: object,
    sizes: Sequence[int],
    weights: Sequence[float],
    scale: Tensor | None,
) -> None:
    """Give the last stage the targets of a batch, and the factors of its losses."""
    _stage(created_on, local_id).add_targets(Plan(*plan), split_target(target, sizes), weights, scale)


async def run_step(created_on: int, local_id: int, plan: PlanItems, sizes: Sequence[int]) -> tuple[object, ...]:
    """Return the stage's result of a step, once it has run its passes.

    If the caller cancels, is lost or has waited until its deadline, the stage drops the step.
    """
    stage, facts = _stage(created_on, local_id), Plan(*plan)
    try:
        await _notified(lambda notify: stage.when_ended(facts, notify))
        return tuple(stage.take_result(facts, sizes))
    finally:
        stage.drop(facts.number)


async def drop_step(created_on: int, local_id: int, number: int) -> None:
    """Drop a step, and wait for the end of a pass that is running."""
    stage = _stage(created_on, local_id)
    stage.drop(number)
    await _notified(stage.when_idle)


async def reset_gradients(created_on: int, local_id: int, number: int, set_to_none: bool) -> None:
    """Reset the gradients of the stage's module, after a pass that is still running.

    Args:
        number: of the last step. If it failed before this stage began to wait for its end, the stage still runs it.
        set_to_none: False sets the gradients to zero.
    """
    stage = _stage(created_on, local_id)
    stage.drop(number)
    await _notified(stage.when_idle)
    stage.module.zero_grad(set_to_none)


async def _notified(register: Callable[[Callable[[], None]], None]) -> None:
    """Wait until the function that `register` gets is called, in any thread."""
    loop = asyncio.get_running_loop()
    waiting = loop.create_future()

    def wake() -> None:
        if not waiting.done():
            waiting.set_result(None)

    def notify() -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the worker has closed its loop
            pass

    register(notify)
    await waiting
