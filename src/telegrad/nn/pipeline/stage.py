"""Stage of a pipeline on its owner: runs its passes as their inputs arrive.

No thread waits for a message. The thread that brings an input runs all passes that are ready, sends their results to
the neighbors, and returns. So any number of stages share a worker, whatever its number of threads.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from telegrad.nn.pipeline.local_step import Input, LocalStep, LossFunction, Outgoing, Plan
from telegrad.nn.pipeline.micro_batches import Values, join, join_gradients
from telegrad.nn.pipeline.schedule import SCHEDULES, Pass, PassKind, Schedule, forward_only
from telegrad.worker.scope import current, without_autocast

__all__ = ["PipelineStage", "StageConfig", "StageResult"]

Send = Callable[[Plan, int, Outgoing], None]
"""Sends the result of a pass of a micro-batch to a neighbor."""


class StageConfig(NamedTuple):
    """Facts of a stage that do not change."""

    number: int
    stages: int
    schedule: str
    device: str = "cpu"
    loss_fn: LossFunction | None = None  # at the last stage, for training


class StageResult(NamedTuple):
    """Contribution of a stage to the result of a step."""

    times: list[tuple[int, int, float, float]]  # kind, micro-batch, begin, end
    loss: torch.Tensor | None = None
    outputs: object = None
    input_gradients: "list[torch.Tensor | None] | None" = None


class PipelineStage:
    """Module with an inbox, which runs one step of its pipeline at a time.

    Args:
        module: the stage's part of the model.
        config: the stage's place in the pipeline.
        name: of the worker, for errors.
    """

    def __init__(self, module: nn.Module, config: StageConfig, name: str) -> None:
        self.module: nn.Module = module
        self._config: StageConfig = config
        self._name = name
        self._device = torch.device(config.device)
        self._schedule: Schedule = SCHEDULES[config.schedule]
        self._is_last = config.number == config.stages - 1
        self._send_forward: Send | None = None
        self._send_backward: Send | None = None
        self._lock = threading.Lock()
        self._step: LocalStep | None = None
        self._ended = 0  # number of the last step that has ended
        self._running = False  # a thread runs a pass
        self._on_end: dict[int, Callable[[], None]] = {}  # by step
        self._on_idle: list[Callable[[], None]] = []

    def connect(self, forward: Send | None, backward: Send | None) -> None:
        """Set the functions that send to the next and to the previous stage."""
        self._send_forward, self._send_backward = forward, backward

    # ---- messages, in any thread of the worker

    def add_inputs(self, plan: Plan, first: int, batches: Sequence[Values], needs_gradient: tuple[bool, ...]) -> None:
        """Add the inputs of forward passes, and run what is ready.

        Args:
            plan: the step.
            first: the first of the micro-batches.
            batches: arguments of the module, by micro-batch.
            needs_gradient: the arguments for which the sender needs a gradient.
        """

        def add(step: LocalStep) -> None:
            for i, values in enumerate(batches, first):
                step.inputs[i] = Input(values, needs_gradient)

        self._deliver(plan, add)

    def add_gradients(self, plan: Plan, i: int, gradients: Values) -> None:
        """Add the gradients of a micro-batch's results, and run what is ready."""

        def add(step: LocalStep) -> None:
            step.gradients[i] = gradients

        self._deliver(plan, add)

    def add_targets(
        self, plan: Plan, targets: Sequence[object], weights: Sequence[float], scale: torch.Tensor | None
    ) -> None:
        """Add the targets of all micro-batches, the weights and the scale of their losses."""

        def add(step: LocalStep) -> None:
            step.targets, step.weights, step.scale = list(targets), list(weights), scale

        self._deliver(plan, add)

    def _deliver(self, plan: Plan, add: Callable[[LocalStep], None]) -> None:
        with self._lock:
            step, replaced = self._enter(plan)
            if step is not None:
                add(step)
        del replaced  # outside of the lock: finalizers of the program may run
        self._run_ready()

    def _enter(self, plan: Plan) -> tuple[LocalStep | None, object]:
        """Return the step of a message, and what an unfinished step before it held.

        The step is None if it has ended. Its first message begins it; messages of several senders come in any order.
        """
        if plan.number <= self._ended:
            return None, None
        step, held = self._step, None
        if step is not None and step.plan.number != plan.number:
            if plan.number < step.plan.number:
                return None, None
            held = self._end(step)
            step = None
        if step is None:
            config, scope = self._config, current.get()
            assert scope is not None
            schedule = self._schedule if plan.training else forward_only
            order = schedule(config.stages, plan.micro_batches)[config.number]
            scope = scope._replace(request=False, autograd=None)
            step = self._step = LocalStep(plan, order, self._device, scope)
        return step, held

    # ---- the end of a step

    def when_ended(self, plan: Plan, callback: Callable[[], None]) -> None:
        """Call a function once the step is complete, has failed, or has been dropped."""
        with self._lock:
            step, replaced = self._enter(plan)
            waits = step is not None and not self._has_ended(step)
            if waits:
                self._on_end[plan.number] = callback
        del replaced
        if not waits:
            callback()

    @staticmethod
    def _has_ended(step: LocalStep) -> bool:
        return step.is_complete or step.error is not None

    def take_result(self, plan: Plan, sizes: Sequence[int]) -> StageResult:
        """End a step and return its result.

        Args:
            plan: the step.
            sizes: of the micro-batches.

        Raises:
            errors of the module, of the loss function, and of sending to a neighbor.
        """
        with self._lock:
            step = self._step
            if step is None or step.plan.number != plan.number or not self._has_ended(step):
                return StageResult([])  # dropped by its caller
            error, step.error = step.error, None
            times, losses = step.times, step.losses
            outputs, gradients = step.outputs, step.input_gradients
            held = self._end(step)
        del held, step
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        with without_autocast():
            return StageResult(
                times,
                torch.stack(losses).sum() if losses else None,
                join(outputs) if outputs else None,
                join_gradients(gradients, sizes) if gradients else None,
            )

    def drop(self, number: int) -> None:
        """End a step without a result, and all before it; a pass that is running goes on."""
        with self._lock:
            step = self._step
            held = None if step is None or step.plan.number > number else self._end(step)
            self._ended = max(self._ended, number)
            callback = self._on_end.pop(number, None)
        del held, step
        if callback is not None:
            callback()

    def _end(self, step: LocalStep) -> list[object]:
        """End the current step, with the lock held; return what it held."""
        self._step = None
        self._ended = max(self._ended, step.plan.number)
        return step.drop()

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call a function once no pass is running."""
        with self._lock:
            waits = self._running
            if waits:
                self._on_idle.append(callback)
        if not waits:
            callback()

    # ---- passes

    def _run_ready(self) -> None:
        """Run passes until the next one has no input yet, or another thread runs them."""
        while True:
            with self._lock:
                step = self._step
                one = None if self._running or step is None or step.error else step.next_ready(self._is_last)
                if step is None or one is None:
                    return
                self._running = True
            self._run(step, one)
            self._end_pass(step)

    def _end_pass(self, step: LocalStep) -> None:
        """Notify threads and tasks that wait for the end of the pass, or of its step."""
        callback, held = None, None
        with self._lock:
            self._running = False
            idle, self._on_idle = self._on_idle, []
            if step.error is None:
                step.position += 1
            if step.dropped:
                held, step.error = step.drop(), None
            elif self._has_ended(step):
                callback = self._on_end.pop(step.plan.number, None)
        del held
        for each in idle:
            each()
        if callback is not None:
            callback()

    def _run(self, step: LocalStep, one: Pass) -> None:
        """Run a pass and send its result to the neighbor.

        The thread may belong to a message with another state of torch, or of another step.
        """
        # In a new thread, matrix products ignore `torch.set_num_threads` and are rounded differently until this call.
        torch.get_num_threads()
        token = current.set(step.scope)
        try:
            with without_autocast(), torch.inference_mode(False), torch.enable_grad():
                self._run_in_state(step, one)
        except BaseException as raised:  # also SystemExit: the caller gets it, this thread continues
            error = raised
            if isinstance(raised, StopIteration):  # a coroutine cannot raise it
                error = RuntimeError("the stage raised StopIteration")
                error.__cause__ = raised
            kind = "forward" if one.kind == PassKind.FORWARD else "backward"
            number, stages = self._config.number, self._config.stages
            error.add_note(
                f"in stage {number} of {stages} of a pipeline, on worker {self._name}: {kind} pass of micro-batch"
                f" {one.micro_batch}"
            )
            step.error = error
        finally:
            current.reset(token)

    def _run_in_state(self, step: LocalStep, one: Pass) -> None:
        if one.kind == PassKind.FORWARD:
            result = step.forward(self.module, one.micro_batch, self._is_last)
            send = self._send_forward
        else:
            result = step.backward(one.micro_batch, self._config.loss_fn if self._is_last else None)
            send = self._send_backward
            if send is None:
                step.input_gradients.append(result.values)
        if send is not None and not step.dropped:
            send(step.plan, one.micro_batch, result)

    def fail(self, plan: Plan, error: BaseException) -> None:
        """End a step with an error of a message to a neighbor."""
        with self._lock:
            step = self._step
            if step is None or step.plan.number != plan.number or step.error is not None:
                return
            step.error = error
            callback = self._on_end.pop(plan.number, None)
        if callback is not None:
            callback()
