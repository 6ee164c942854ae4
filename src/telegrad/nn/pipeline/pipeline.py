"""Pipeline of modules on several workers, as its user has it."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from telegrad import rpc
from telegrad.errors import RemoteError, RpcTimeout, WorkerLost
from telegrad.nn.pipeline import requests
from telegrad.nn.pipeline.arguments import (
    StageSpec,
    check_distinct,
    check_inputs,
    check_options,
    check_reduction,
    detached,
    remote_module,
    scale_of,
)
from telegrad.nn.pipeline.local_step import LossFunction, Plan, run_backward
from telegrad.nn.pipeline.micro_batches import batch_size, divide, target_values
from telegrad.nn.pipeline.schedule import Pass, PassKind
from telegrad.nn.pipeline.stage import PipelineStage, StageResult
from telegrad.nn.pipeline.stage_modules import StageModules
from telegrad.nn.pipeline.times import PassTime, StepTimes
from telegrad.protocols.rref import RRefId
from telegrad.rref import RRef
from telegrad.rref.usable_id import usable_id
from telegrad.timeouts import nanoseconds
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.operation_timeouts import naming_timeouts
from telegrad.worker.scope import caller_state, outside_contexts, without_autocast

__all__ = ["Pipeline", "StageSpec"]

_DEFAULT_TIMEOUT = -1.0
_DROP_TIMEOUT = 5.0  # s for passes of a failed step that still run: `zero_grad` waits for longer ones


def _check_thread(operation: str) -> None:
    """Raise an error in an event loop, before a stage has work of the operation."""
    check_blocking(operation, "`await asyncio.to_thread(...)` for it")


class Pipeline(StageModules):
    """Model in stages on several workers that work on micro-batches in parallel.

    A step divides its batch into micro-batches. Each stage runs their forward and backward passes in the order of a
    schedule, and sends activations and gradients from owner to owner, past the caller. Parameters stay unchanged during
    a step, and gradients are summed in ``.grad``, so they equal those of one process, except for rounding. With the
    same micro-batches in one process, they are equal bit by bit.

    It is an ``nn.Module``: `train`, `eval`, `requires_grad_`, `double` and other conversions to a type, `state_dict`
    and `load_state_dict` apply to all stages. Methods that would return parameters or buffers, or move stages to a
    device, raise ``ValueError``. Several stages may share a worker, and the calling worker may own stages.

    Requirements:

    - A stage takes tensors and other values as positional arguments, and returns a tensor, or a tuple or list of
      tensors and other values: the arguments of the next stage. Its first operation must not change an argument in
      place.
    - Modules that compute over the batch, such as ``BatchNorm``, compute over the micro-batch. Dropout draws from the
      generator of each owner. Both differ from one process with the whole batch.
    - Stages share no parameters: tied weights in two stages become two parameters.

    Args:
        stages: the model's parts, in order. Each is a `RemoteModule`; the arguments of one, as a tuple
            ``(worker, module_cls[, args[, kwargs]])``; or a module of this worker, which is not copied.
        loss_fn: called at the last stage with a micro-batch's result and target; returns a tensor with one element.
            Copied to that stage's owner. None for inference only.
        micro_batches: number of micro-batches of a step, 8 by default. Their sizes differ by one at most.
        schedule: ``"gpipe"`` (all forward, then all backward passes); ``"1f1b"`` (one forward, one backward), the
            default, which keeps fewer activations; ``"eager-1f1b"``, which keeps more than that and waits less for
            messages. Stage s of S, counted from 0, keeps the activations of all micro-batches, of S - s, or of
            2 (S - s) - 1.
        reduction: of ``loss_fn`` over its micro-batch: ``"mean"`` or ``"sum"``. The loss of the batch is the mean,
            weighted with the sizes of the micro-batches, or the sum. A mean with other weights, such as class weights
            or ``ignore_index``, is not that of the batch.

    Attributes:
        stages: the `RemoteModule` of each stage, in an ``nn.ModuleList``.
        times: the `StepTimes` of the last step or inference of the batch; None before.

    Raises:
        ValueError: there are no stages, or two are the same module; an unknown schedule or reduction; ``loss_fn`` has
            another reduction.
        TypeError: a stage is none of the above, or a `RemoteModule` with hooks or a forward of its own, which run on
            this worker; a stage has an ``async def forward``; ``loss_fn`` is no function, or an ``async def``; the
            number of micro-batches is no int.
        RuntimeError: a worker does not exist or is lost, or this process has not joined a group.
        errors of the modules' constructors.

    Sources: Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream", 2019, and "Memory-Efficient Pipeline-Parallel
    DNN Training", 2021; Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2023.

    Example::

        layers = [("worker1", torch.nn.Linear, (8, 8)), ("worker2", torch.nn.Linear, (8, 1))]
        pipe = Pipeline(layers, loss_fn=torch.nn.functional.mse_loss, micro_batches=4)
        optimizer = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1)
        for batch in torch.ones(3, 16, 8):
            pipe.zero_grad()
            loss = pipe.step(batch, target=batch.sum(1, keepdim=True))
            optimizer.step()
        prediction = pipe(batch)                             # shape (16, 1), without gradients
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        loss_fn: LossFunction | None = None,
        *,
        micro_batches: int = 8,
        schedule: Literal["gpipe", "1f1b", "eager-1f1b"] = "1f1b",
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        _check_thread("Pipeline()")
        check_options(stages, micro_batches, schedule)
        check_reduction(reduction, loss_fn)
        modules = [remote_module(number, spec) for number, spec in enumerate(stages)]
        check_distinct(stages, modules)
        super().__init__(modules)
        self.times: StepTimes | None = None
        self._micro_batches = micro_batches
        self._reduction = reduction
        self._trainable = loss_fn is not None
        self._number = 0  # of the last step
        with naming_timeouts(requests.__all__, "Pipeline()"):
            self._rrefs: list[RRef[PipelineStage]] = self._make_stages(schedule, loss_fn)

    def _make_stages(self, schedule: str, loss_fn: LossFunction | None) -> list[RRef[PipelineStage]]:
        last = len(self.stages) - 1
        futures = []
        for index, module in enumerate(self._modules_of_stages()):
            device = module.device
            rref = module.module_rref
            loss = None if loss_fn is None or index < last else rref.worker.calls.name_or_function(loss_fn)
            config = (index, last + 1, schedule, device)
            futures.append(rpc.rpc_async(rref.owner_id, requests.make_stage, (rref, config, loss)))
        rrefs = rpc.wait_all(futures)
        addresses: list[requests.Address | None] = [None, *((rref.owner_id, *rref.id) for rref in rrefs), None]
        neighbors = zip(addresses, addresses[2:], strict=False)
        rpc.wait_all(
            [
                rpc.rpc_async(rref.owner_id, requests.connect, (*rref.id, before, after))
                for rref, (before, after) in zip(rrefs, neighbors, strict=True)
            ]
        )
        return rrefs

    def _usable_ids(self) -> list[RRefId]:
        """Return the ids of all stages.

        Raises:
            OwnerLost: the worker of a stage is lost.
        """
        return [usable_id(rref) for rref in self._rrefs]

    # ---- running it

    @overload
    def step(
        self,
        *inputs: object,
        target: object = ...,
        outputs: Literal[False] = ...,
        scaler: torch.amp.GradScaler | None = ...,
        timeout: float = ...,
    ) -> Tensor: ...
    @overload
    def step(
        self,
        *inputs: object,
        target: object = ...,
        outputs: Literal[True],
        scaler: torch.amp.GradScaler | None = ...,
        timeout: float = ...,
    ) -> tuple[Tensor, Any]: ...

    def step(
        self,
        *inputs: object,
        target: object = None,
        outputs: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        timeout: float = _DEFAULT_TIMEOUT,
    ) -> Any:
        """Run the passes of a batch, and add the gradients to ``.grad``.

        Blocks until all stages have run their passes. An optimizer may step afterwards.

        If inputs require grad, the backward pass continues in this process, in the graph that has computed them.
        Autograd contexts play no part: an input must not come from a tensor that was received in one.

        Args:
            inputs: arguments of the first stage. Tensors are divided along their first dimension, of the same size in
                all; every micro-batch gets other values, and tensors without a dimension, as they are.
            target: second argument of ``loss_fn``, divided like the inputs: a tensor, or a tuple or list of tensors and
                other values. Tensors are detached: no gradient of a target is computed.
            outputs: also return the result of the last stage.
            scaler: scales the loss of each micro-batch for its backward pass, so all gradients are scaled. The returned
                loss is not. Let the same scaler step the optimizer: ``scaler.step(optimizer)``, ``scaler.update()``.
            timeout: limit in seconds for the step; -1 is the worker's default, 0 no limit.

        Returns:
            The loss of the batch, a tensor without dimensions or gradient, which the caller owns. With ``outputs``, the
            loss and the last stage's result for the batch: tensors concatenated along their first dimension, or stacked
            if they have none; lists of other values.

        Raises:
            ValueError: the sizes of tensors differ, or are smaller than the number of micro-batches; the pipeline has
                no ``loss_fn``.
            TypeError: the target is a dict or a set, or has a container inside; an input is a container with a tensor
                that requires grad; the scaler is no ``GradScaler``; the timeout is no number.
            RuntimeError: another step of this pipeline is running; an input comes from a context; a worker is lost
                (`WorkerLost`), or the timeout has expired (`RpcTimeout`).
            errors of modules and of ``loss_fn``: of their original type and of RemoteError, with a note that names the
                stage, its worker and the micro-batch. After any error all stages have dropped the step, and ``.grad``
                may have a part of its gradients: call `zero_grad`.

        Example::

            layers = [("worker1", torch.nn.Linear, (8, 8)), ("worker2", torch.nn.Linear, (8, 3))]
            pipe = Pipeline(layers, torch.nn.CrossEntropyLoss(), micro_batches=4)
            loss, scores = pipe.step(torch.ones(16, 8), target=torch.zeros(16, dtype=torch.long), outputs=True)
            print(loss.shape, scores.shape)  # torch.Size([]) torch.Size([16, 3])
        """
        if not self._trainable:
            raise ValueError("this pipeline has no loss_fn, so it is for inference only: call it instead of step")
        if timeout != _DEFAULT_TIMEOUT:
            nanoseconds(timeout)  # raises the error for what is no timeout, before anything has changed
        check_inputs(inputs)
        needs = tuple(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        scale = None if scaler is None else scale_of(scaler)
        loss, result, gradients = self._run(inputs, needs, target, True, outputs, timeout, scale)
        run_backward(inputs, gradients)
        return (loss, result) if outputs else loss

    def forward(self, *inputs: object) -> Any:
        """Run the forward passes of a batch without gradients, for inference.

        The stages run in the mode that `train` or `eval` has set. A batch that is smaller than the number of
        micro-batches has fewer of them.

        Args:
            inputs: see `step`.

        Returns:
            The result of the last stage, see `step`.

        Raises:
            errors of `step`.

        Example::

            pipe = Pipeline([("worker1", torch.nn.Linear, (8, 8)), ("worker2", torch.nn.Linear, (8, 3))]).eval()
            print(pipe(torch.ones(16, 8)).shape)  # torch.Size([16, 3])
        """
        _, result, _ = self._run(inputs, (False,) * len(inputs), None, False, True, _DEFAULT_TIMEOUT)
        return result

    def _run(
        self,
        inputs: tuple[object, ...],
        needs: tuple[bool, ...],
        target: object,
        training: bool,
        outputs: bool,
        timeout: float,
        scale: Tensor | None = None,
    ) -> tuple[Tensor | None, Any, Sequence[Tensor | None]]:
        """Run all passes; return the loss, the outputs and the gradients of the inputs."""
        _check_thread(requests.operation_of(training))
        begin = time.monotonic()
        batch = batch_size((*inputs, *(target_values(target) if training else ())))
        count = self._micro_batches if training else min(self._micro_batches, batch)
        if not 0 < count <= batch:
            raise ValueError(f"a batch of {batch} cannot be divided into {count} micro-batches: use a larger batch")
        sizes = divide(batch, count)
        autocast = caller_state()
        with (
            naming_timeouts(requests.__all__, requests.operation_of(training), training),
            self._exclusive(),
            outside_contexts(),
            without_autocast(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            ids = self._usable_ids()
            self._number += 1
            plan = Plan(self._number, training, outputs, count, autocast)
            futures: list[CallFuture[Any]] = []
            try:
                self._begin(futures, ids, plan, inputs, needs, target, sizes, scale, timeout)
                results = [StageResult(*each) for each in rpc.wait_all(futures)[-len(self.stages) :]]
            except BaseException as error:
                self._drop(futures, plan, error, timeout, begin)
                raise
        stages = [[PassTime(Pass(PassKind(kind), i), *span) for kind, i, *span in each.times] for each in results]
        self.times = StepTimes(time.monotonic() - begin, stages)
        last = results[-1]
        return last.loss, last.outputs, results[0].input_gradients or [None] * len(inputs)

    def _begin(
        self,
        futures: list[CallFuture[Any]],
        ids: Sequence[RRefId],
        plan: Plan,
        inputs: tuple[object, ...],
        needs: tuple[bool, ...],
        target: object,
        sizes: tuple[int, ...],
        scale: Tensor | None,
        timeout: float,
    ) -> None:
        """Send the batch, and ask all stages for their results."""

        def send(stage: int, function: Callable[..., object], *args: object) -> None:
            owner = self._rrefs[stage].owner_id
            futures.append(rpc.rpc_async(owner, function, (*ids[stage], tuple(plan), *args), timeout=timeout))

        values = tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)
        send(0, requests.feed, values, needs, sizes)
        if plan.training:
            weights = [size / sum(sizes) if self._reduction == "mean" else 1.0 for size in sizes]
            send(-1, requests.feed_targets, detached(target), sizes, weights, scale)
        for stage in range(len(ids)):
            send(stage, requests.run_step, sizes)

    def _drop(
        self, futures: Sequence[CallFuture[Any]], plan: Plan, error: BaseException, timeout: float, begin: float
    ) -> None:
        """Drop a failed step at all stages; wait a while for passes that still run."""
        for future in futures:
            future._mark_read()
            future.cancel()
        limit = rpc.get_rpc_timeout() if timeout == _DEFAULT_TIMEOUT else timeout
        left = begin + limit - time.monotonic() if limit else 0.0
        timed_out = isinstance(error, RpcTimeout) and not isinstance(error, RemoteError)
        if timed_out or not isinstance(error, Exception) or left < 0:
            return  # each stage drops the step when it learns of the deadline or the cancellation
        dropped: list[CallFuture[None]] = []
        # A stage may have noticed a loss of which this worker learns later: until then, a request would wait.
        lost = error.name if isinstance(error, WorkerLost) else None
        left = min(left or _DROP_TIMEOUT, _DROP_TIMEOUT)
        for rref in self._rrefs:
            if rref.owner_name() == lost:
                continue
            try:
                ids = usable_id(rref)
                dropped.append(rpc.rpc_async(rref.owner_id, requests.drop_step, (*ids, plan.number), timeout=left))
            except Exception:  # the worker is lost or closed, and with it the step
                pass
        for future in dropped:
            try:
                future.wait()
            except Exception:
                pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the ``.grad`` of all parameters on their owners.

        Waits for passes of a failed step that are still running.

        Args:
            set_to_none: False sets them to zero instead.

        Raises:
            RuntimeError: a worker is lost, or a step is running in another thread.
        """
        _check_thread("Pipeline.zero_grad")
        with naming_timeouts(requests.__all__, "Pipeline.zero_grad"), self._exclusive(), outside_contexts():
            rpc.wait_all(
                [
                    rpc.rpc_async(rref.owner_id, requests.reset_gradients, (*each, self._number, set_to_none))
                    for rref, each in zip(self._rrefs, self._usable_ids(), strict=True)
                ]
            )
