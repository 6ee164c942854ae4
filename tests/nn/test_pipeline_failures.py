"""Errors of pipelines: the caller gets them, and the next step works."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_helpers import (
    Failing,
    Gate,
    Gated,
    batch,
    equal,
    gates,
    gradients,
    gradients_here,
    layer,
    loss_of_first,
    one_process,
    stages,
    step_here,
)
from torch import Tensor, nn

from telegrad.errors import RemoteError, RpcTimeout, SerializationError
from telegrad.nn import Pipeline
from telegrad.nn.pipeline import requests
from telegrad.testing import assert_quiescent, eventually
from telegrad.worker import Worker
from telegrad.worker.default_worker import open_worker

SCHEDULES = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    gates.clear()
    yield
    gates.clear()
    if "three" in request.fixturenames:
        for worker in request.getfixturevalue("three"):
            assert_quiescent(worker)


def in_a_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


# ---- errors of stages


@SCHEDULES
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.usefixtures("three", "quiet")
def test_an_error_of_a_module(schedule: Any, stage: int, where: str) -> None:
    places = ["w1", "w2", "w0"]
    specs = [(place, Failing, (where if n == stage else "", n)) for n, place in enumerate(places)]
    pipe = Pipeline(specs, loss_of_first, micro_batches=3, schedule=schedule)
    x, target = batch(6)
    marks = torch.zeros(6)
    before = pipe.step(x, marks, target=target)
    marks[3] = Failing.MARK  # in micro-batch 1
    with pytest.raises(KeyError, match=f"in the {where} pass") as raised:
        pipe.step(x, marks, target=target)
    assert isinstance(raised.value, RemoteError)
    assert raised.value.__notes__[-1] == (
        f"in stage {stage} of 3 of a pipeline, on worker {places[stage]}: {where} pass of micro-batch 1"
    )
    assert "pipeline_helpers.py" in raised.value.remote_traceback
    del raised
    pipe.zero_grad()
    assert pipe.step(x, torch.zeros(6), target=target) == before
    found = gradients(pipe)
    pipe.zero_grad()
    pipe.step(x, torch.zeros(6), target=target)
    assert equal(found, gradients(pipe))


@pytest.mark.usefixtures("three", "quiet")
def test_an_error_of_the_loss() -> None:
    pipe = Pipeline([("w1", Failing, ("",)), ("w2", Failing, ("",))], loss_of_first, micro_batches=2)
    x, target = batch(4)
    marks = torch.full((4,), -Failing.MARK)
    with pytest.raises(KeyError, match="in the loss"):
        pipe.step(x, marks, target=target)
    assert pipe.step(x, torch.zeros(4), target=target) > 0


@pytest.mark.usefixtures("three", "quiet")
def test_a_loss_that_misses_its_target() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=2)
    with pytest.raises(AttributeError) as raised:
        pipe.step(batch(4)[0])
    assert "loss_fn got the target None: pass target= to the pipeline's step" in raised.value.__notes__


@pytest.mark.usefixtures("three", "quiet")
@pytest.mark.parametrize("loss_fn", [lambda y, _: y, lambda y, _: 1.0], ids=["vector", "number"])
def test_a_loss_that_is_no_scalar(loss_fn: Any) -> None:
    pipe = Pipeline(stages(["w1", "w2"]), loss_fn, micro_batches=2)
    with pytest.raises(ValueError, match="has to return a tensor with one element"):
        pipe.step(batch(4)[0])


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


class Unsendable(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, threading.Lock]:
        return x, threading.Lock()  # type: ignore[return-value]


@pytest.mark.usefixtures("three", "quiet")
def test_results_that_cannot_be_passed_on() -> None:
    x, target = batch(4)
    for first, error in ((Nested, TypeError), (Unsendable, SerializationError)):
        pipe = Pipeline([("w1", first, ()), ("w2", layer, (0,))], F.mse_loss, micro_batches=2)
        with pytest.raises(error):
            pipe.step(x, target=target)
    del pipe


@pytest.mark.usefixtures("three", "quiet")
def test_inputs_that_cannot_be_sent() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=2)
    x, target = batch(4)
    with pytest.raises(SerializationError):
        pipe.step(x, threading.Lock(), target=target)
    with pytest.raises(SerializationError):  # the first stage has got the batch
        pipe.step(x, target=(target, threading.Lock()))
    assert pipe.step(x, target=target) == step_here(one_process(2), x, target, micro_batches=2)


@pytest.mark.usefixtures("three")
def test_errors_of_constructors() -> None:
    def failing() -> nn.Module:
        raise KeyError("cannot be made")

    with pytest.raises(KeyError, match="cannot be made"):
        Pipeline([("w1", layer, (0,)), ("w2", failing)])
    with pytest.raises(RuntimeError, match="could not find destination name unknown"):
        Pipeline([("unknown", layer, (0,))])


# ---- misuse


@pytest.mark.usefixtures("three")
def test_invalid_arguments() -> None:
    specs = stages(["w1"])
    with pytest.raises(ValueError, match="needs at least one stage"):
        Pipeline([])
    with pytest.raises(ValueError, match="unknown schedule 'zero': the schedules are 'gpipe', '1f1b', 'eager-1f1b'"):
        Pipeline(specs, schedule="zero")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown reduction 'none'"):
        Pipeline(specs, reduction="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has reduction='sum', but the pipeline has reduction='mean'"):
        Pipeline(specs, nn.MSELoss(reduction="sum"))
    with pytest.raises(ValueError, match="has to be at least 1, and is 0"):
        Pipeline(specs, micro_batches=0)
    for spec in ("w1", ("w1",), 5):
        with pytest.raises(TypeError, match="stage 0 of a pipeline has to be a RemoteModule"):
            Pipeline([spec])  # type: ignore[list-item]


@pytest.mark.usefixtures("three")
def test_batches_that_cannot_be_divided() -> None:
    pipe = Pipeline(stages(["w1"]), F.mse_loss, micro_batches=4)
    x, target = batch(3)
    with pytest.raises(ValueError, match="a batch of 3 cannot be divided into 4 micro-batches"):
        pipe.step(x, target=target)
    with pytest.raises(ValueError, match="differ in their first dimension: 3, 2"):
        pipe.step(x, target=target[:2])
    with pytest.raises(ValueError, match="a batch of 0 cannot be divided"):
        pipe(x[:0])


@pytest.mark.usefixtures("three")
def test_a_step_while_another_is_running() -> None:
    pipe = Pipeline([("w1", Gated, ("first",)), ("w2", layer, (1,))], F.mse_loss, micro_batches=2)
    x, target = batch(4)
    gate = gates["first"] = Gate()
    losses = list[Tensor]()
    thread = in_a_thread(on_this_worker(lambda: losses.append(pipe.step(x, target=target))))
    assert gate.entered.wait(30)
    for use in (lambda: pipe.step(x, target=target), lambda: pipe(x), pipe.zero_grad):
        with pytest.raises(RuntimeError, match="a step of this pipeline is running in another thread"):
            use()
    gate.opened.set()
    thread.join()
    assert losses == [step_here(one_process(2), x, target, micro_batches=2)]


def on_this_worker(function: Callable[[], object]) -> Callable[[], None]:
    """Return the function for another thread, with the worker of this one."""
    worker = open_worker()

    def run() -> None:
        with worker:
            function()

    return run


# ---- timeouts


@pytest.mark.usefixtures("three", "quiet")
def test_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline([("w1", layer, (0,)), ("w2", Gated, ("second", 1))], F.mse_loss, micro_batches=3)
    x, target = batch(6)
    gate = gates["second"] = Gate()
    with pytest.raises(RpcTimeout, match=r"\(Pipeline.step on w[12]; [a-z ]+\)\. .*ass a larger timeout="):
        pipe.step(x, target=target, timeout=0.3)
    assert gate.entered.wait(30)
    with monkeypatch.context() as patch:
        patch.setattr(open_worker().calls, "default_timeout", 300_000_000)
        text = r"\(Pipeline.zero_grad on w[12]; [a-z ]+\). Give init_rpc's options a larger rpc_timeout"
        with pytest.raises(RpcTimeout, match=text):
            pipe.zero_grad()
    resetting = in_a_thread(on_this_worker(pipe.zero_grad))  # waits for the pass that still runs
    gate.opened.set()
    resetting.join()
    del gates["second"]
    model = one_process(2)
    assert pipe.step(x, target=target, timeout=0) == step_here(model, x, target, micro_batches=3)
    assert equal(gradients(pipe), gradients_here(model))


@pytest.mark.usefixtures("three", "quiet")
def test_a_timeout_between_stages_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage that sends may learn of the deadline before the trainer does."""
    pipe = Pipeline([("w1", layer, (0,)), ("w2", Gated, ("second",))], loss_of_first, micro_batches=2)
    gate = gates["second"] = Gate()
    send = Worker.rpc_async

    def limited(self: Worker, to: Any, function: Any, *args: Any, **options: Any) -> Any:
        if function is requests.accept_inputs:
            options["timeout"] = 0.3
        return send(self, to, function, *args, **options)

    monkeypatch.setattr(Worker, "rpc_async", limited)
    with pytest.raises(RpcTimeout, match=r"\(Pipeline.step on w2; [a-z ]+\)\. .*ass a larger timeout="):
        pipe.step(batch(2)[0], timeout=0)
    gate.opened.set()


async def expired(*_: object) -> None:
    """Take the place of a late `run_step`: the stage learns of no deadline."""
    raise OSError("late")


@pytest.mark.usefixtures("three", "quiet")
def test_gradients_are_reset_after_a_step_whose_end_no_request_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline([("w0", Gated, ("first",))], F.mse_loss, micro_batches=3)
    x, target = batch(6)
    gate = gates["first"] = Gate()
    for request in ("run_step", "drop_step"):
        monkeypatch.setattr(f"telegrad.nn.pipeline.requests.{request}", expired)
    with pytest.raises(OSError, match="late"):
        pipe.step(x, target=target)
    monkeypatch.undo()
    assert gate.entered.wait(30)
    resetting = in_a_thread(on_this_worker(pipe.zero_grad))
    stage = requests._stage(*pipe._rrefs[0].id)
    eventually(lambda: bool(stage._on_idle))
    gate.opened.set()
    resetting.join()
    del gates["first"]
    assert stage._step is None
    assert not any(one is not None for one in gradients(pipe))


class Stops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return next(iter([x][1:]))


@pytest.mark.usefixtures("three", "quiet")
def test_stop_iteration_of_a_module() -> None:
    pipe = Pipeline([("w1", Stops)], loss_of_first, micro_batches=1)
    with pytest.raises(RuntimeError, match="the stage raised StopIteration") as raised:
        pipe.step(batch(2)[0])
    assert "forward pass of micro-batch 0" in raised.value.__notes__[-1]
    del raised
