"""Steps of pipelines: equal to the same model in one process."""

import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from pipeline_helpers import (
    FEATURES,
    Chain,
    Pair,
    Pick,
    batch,
    equal,
    gradients,
    gradients_here,
    layer,
    one_process,
    stages,
    step_here,
)
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.nn import Pipeline, RemoteModule
from telegrad.nn.pipeline import requests
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import Options
from telegrad.testing import cluster

pytestmark = pytest.mark.usefixtures("clean")

SCHEDULE_NAMES = ["gpipe", "1f1b", "eager-1f1b"]
SCHEDULES = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
PLACES = pytest.mark.parametrize(
    "places", [["w1"], ["w1", "w2"], ["w0", "w1"], ["w1", "w1", "w2"], ["w1", "w2", "w0", "w2"]], ids="-".join
)


# ---- gradients


@SCHEDULES
@PLACES
def test_a_step_equals_one_process_bit_by_bit(schedule: Any, places: list[str]) -> None:
    pipe = Pipeline(stages(places), F.mse_loss, micro_batches=4, schedule=schedule)
    model = one_process(len(places))
    for number in range(2):  # gradients are accumulated over steps
        x, target = batch(8, number)
        loss = pipe.step(x, target=target)
        assert loss == step_here(model, x, target, micro_batches=4)
        assert not loss.requires_grad
    assert equal(gradients(pipe), gradients_here(model))


def test_the_first_step_uses_the_threads_that_the_program_has_set() -> None:
    """Two threads of torch round the product of 33 rows differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cluster(2):  # its threads have not run anything
            pipe = Pipeline([("w1", nn.Linear, (16, FEATURES))], F.mse_loss, micro_batches=1)
            model = nn.Linear(16, FEATURES)
            model.load_state_dict(pipe.stages[0].state_dict())
            x, target = torch.randn(33, 16), torch.randn(33, FEATURES)
            pipe.step(x, target=target)
            step_here(model, x, target)
            assert equal(gradients(pipe), gradients_here(model))
            del pipe
    finally:
        torch.set_num_threads(before)


@SCHEDULES
def test_a_step_equals_the_whole_batch_except_for_rounding(schedule: Any) -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=4, schedule=schedule)
    model = one_process(2).double()
    for stage in pipe.stages:
        stage.double()
    x, target = (value.double() for value in batch(10))  # micro-batches of 3, 3, 2, 2
    loss, outputs = pipe.step(x, target=target, outputs=True)
    assert torch.allclose(loss, step_here(model, x, target), rtol=1e-12)
    assert torch.allclose(outputs, model(x), rtol=1e-12)
    for found, expected in zip(gradients(pipe), gradients_here(model), strict=True):
        assert found is not None
        assert expected is not None
        assert torch.allclose(found, expected, rtol=1e-10)


def test_all_schedules_give_equal_gradients() -> None:
    pipes = [Pipeline(stages(["w1", "w2"]), F.mse_loss, schedule=name) for name in SCHEDULE_NAMES]  # type: ignore[arg-type]
    x, target = batch(19)
    for pipe in pipes:
        pipe.step(x, target=target)
    assert all(equal(gradients(pipes[0]), gradients(pipe)) for pipe in pipes)


def test_a_sum_over_the_batch() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), nn.MSELoss(reduction="sum"), micro_batches=3, reduction="sum")
    model = one_process(2)
    x, target = batch(7)
    loss = pipe.step(x, target=target)
    assert torch.allclose(loss, nn.MSELoss(reduction="sum")(model(x), target))


@SCHEDULES
def test_tuples_indices_and_other_values(schedule: Any) -> None:
    specs = [("w1", Pair, (0,)), ("w2", Pair, (1,)), ("w1", Pick, (2,))]
    pipe = Pipeline(specs, F.mse_loss, micro_batches=3, schedule=schedule)
    model = Chain(Pair(0), Pair(1), Pick(2))
    x, target = batch(7)
    index = torch.arange(7)
    loss, outputs = pipe.step(x, index, 0.5, target=target, outputs=True)
    expected = model(x, index, 0.5)
    F.mse_loss(expected, target).backward()
    assert torch.allclose(outputs, expected)
    assert torch.allclose(loss, F.mse_loss(expected, target))
    for found, mine in zip(gradients(pipe), gradients_here(model), strict=True):
        assert found is not None
        assert mine is not None
        assert torch.allclose(found, mine, atol=1e-6)


def test_tuples_as_targets_and_results() -> None:
    def loss_fn(result: tuple[Tensor, Tensor, float], target: tuple[Tensor, float]) -> Tensor:
        return ((result[0] - target[0]) * target[1]).square().mean()

    pipe = Pipeline([("w1", Pair, (0,)), ("w2", Pair, (1,))], loss_fn, micro_batches=2)
    x, target = batch(4)
    loss, (y, index, scales) = pipe.step(x, torch.zeros(4, dtype=torch.long), target=(target, 2.0), outputs=True)
    model = Chain(Pair(0), Pair(1))
    expected = model(x, torch.zeros(4, dtype=torch.long))
    assert torch.allclose(loss, loss_fn(expected, (target, 2.0)))
    assert torch.allclose(y, expected[0])
    assert index.tolist() == [2] * 4
    assert scales == [4.0, 4.0]


def test_inputs_that_require_grad_continue_in_this_process() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=3)
    model, first, mine = one_process(2), layer(7), layer(7)
    x, target = batch(8)
    leaf = x.clone().requires_grad_()
    pipe.step(first(leaf), target=target)
    other = x.clone().requires_grad_()
    F.mse_loss(model(mine(other)), target).backward()
    assert leaf.grad is not None
    assert other.grad is not None
    assert torch.allclose(leaf.grad, other.grad, atol=1e-7)
    for found, expected in zip(first.parameters(), mine.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, atol=1e-7)  # type: ignore[arg-type]


def test_frozen_stages() -> None:
    pipe = Pipeline(stages(["w1", "w2", "w1"]), F.mse_loss, micro_batches=2)
    model = one_process(3)
    pipe.stages[0].requires_grad_(False)
    pipe.stages[1].requires_grad_(False)
    x, target = batch(4)
    pipe.step(x, target=target)
    step_here(model, x, target, micro_batches=2)
    assert gradients(pipe)[:8] == [None] * 8
    assert equal(gradients(pipe)[8:], gradients_here(model[2]))
    del pipe.stages


def test_a_loss_without_targets() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), lambda result, _: result.square().mean(), micro_batches=2)
    x, _ = batch(4)
    assert torch.allclose(pipe.step(x), one_process(2)(x).square().mean())


# ---- the caller's state


def test_the_callers_grad_mode_and_context_play_no_part() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=2)
    model = one_process(2)
    x, target = batch(4)
    with torch.no_grad():
        pipe.step(x, target=target)
    with torch.inference_mode():
        pipe.step(x * 1, target=target * 1)
    with autograd.context() as context_id:
        pipe.step(x, target=target)
        assert autograd.get_gradients(context_id) == {}
    for _ in range(3):
        step_here(model, x, target, micro_batches=2)
    assert equal(gradients(pipe), gradients_here(model))


def test_autocast_applies_to_the_forward_passes() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), lambda y, _: y.float().square().mean(), micro_batches=2)
    model = one_process(2)
    x, _ = batch(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, outputs = pipe.step(x, outputs=True)
        expected = model(x)
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(outputs, expected)
    assert torch.allclose(loss, expected.float().square().mean(), rtol=1e-2)
    assert pipe(x).dtype == torch.float32


class Noting(nn.Module):
    """Stage that notes the dtype of each result with its own number."""

    seen: ClassVar[list[tuple[int, torch.dtype]]] = []
    last_ran: ClassVar[threading.Event] = threading.Event()

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.layer = layer(number)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.seen.append((self.number, y.dtype))
        if self.number == 2:
            self.last_ran.set()
        return y


@SCHEDULES
@pytest.mark.parametrize("late", ["feed_targets", "run_step"])
def test_autocast_does_not_depend_on_the_order_of_messages(schedule: Any, late: str) -> None:
    """The message arrives after the first forward pass of the last stage."""
    Noting.seen.clear()
    Noting.last_ran.clear()

    def hold(call: Any, proceed: Any) -> Any:
        if call.name.endswith(late):
            assert Noting.last_ran.wait(30)
        return proceed(call)

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y @ target.T, target @ target.T)

    specs = [("w1", Noting, (0,)), ("w2", Noting, (1,)), ("w1", Noting, (2,))]
    pipe = Pipeline(specs, loss_fn, schedule=schedule)
    model = one_process(3)
    x, target = batch(16)
    with rpc.intercept(client=hold), torch.autocast("cpu", dtype=torch.float16):
        pipe.step(x, target=target)
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu")
    assert sorted(Noting.seen, key=str) == [(number, torch.float16) for number in range(3) for _ in range(8)]
    for part, expected in zip(x.split(2), target.split(2), strict=True):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(model(part), expected) / 8
        loss.backward()  # type: ignore[no-untyped-call]
    assert equal(gradients(pipe), gradients_here(model))


@pytest.mark.parametrize(
    ("autocast", "dtype"), [(None, torch.float32), ((("cpu", "float16"), ("cache", "off")), torch.float16)]
)
def test_passes_run_in_the_state_of_the_step_not_of_the_message(autocast: Any, dtype: torch.dtype) -> None:
    pipe = Pipeline([("w1", Noting, (0,)), ("w2", Noting, (1,))])
    Noting.seen.clear()
    first, last = (rref.id for rref in pipe._rrefs)
    plan, x = (1, False, True, 2, autocast), batch(4)[0]
    with torch.inference_mode(), torch.autocast("cpu"):
        rpc.rpc_sync("w1", requests.feed, (*first, plan, (x,), (False,), (2, 2)))
        _, _, outputs, _ = rpc.rpc_sync("w2", requests.run_step, (*last, plan, (2, 2)))
        rpc.rpc_sync("w1", requests.run_step, (*first, plan, (2, 2)))
    assert outputs.dtype == dtype
    assert sorted(Noting.seen, key=str) == [(0, dtype), (0, dtype), (1, dtype), (1, dtype)]


def drive() -> tuple[float, float]:
    """Run a pipeline from a handler."""
    pipe = Pipeline(stages(["w0", "w1", "w2"]), F.mse_loss, micro_batches=2)
    x, target = batch(4)
    return pipe.step(x, target=target).item(), step_here(one_process(3), x, target, micro_batches=2).item()


def test_a_pipeline_in_a_handler() -> None:
    found, expected = rpc.rpc_sync("w2", drive)
    assert found == expected


@SCHEDULES
def test_workers_with_one_thread(schedule: Any) -> None:
    """No thread waits for a message, so any number of stages shares it."""
    with cluster(2, Options(num_worker_threads=1), names="single{}", check=False):
        places = ["single1", "single1", "single0", "single1", "single0"]
        pipe = Pipeline(stages(places), F.mse_loss, micro_batches=6, schedule=schedule)
        x, target = batch(13)
        assert pipe.step(x, target=target) == step_here(one_process(5), x, target, micro_batches=6)


# ---- messages


def test_activations_travel_from_owner_to_owner() -> None:
    calls = list[str]()

    def note(call: Any, proceed: Any) -> Any:
        calls.append(call.name.rpartition(".")[2])
        return proceed(call)

    pipe = Pipeline(stages(["w1", "w2", "w1"]), F.mse_loss, micro_batches=4)
    x, target = batch(8)
    with rpc.intercept(client=note, server=note):
        pipe.step(x, target=target)
    assert calls == ["feed", "feed_targets", "run_step", "run_step", "run_step"]


def test_stages_keep_nothing_after_a_step() -> None:
    pipe = Pipeline(stages(["w0"]), F.mse_loss, micro_batches=2)
    x, target = batch(4)
    pipe.step(x, target=target)
    stage = pipe._rrefs[0].local_value()
    assert stage._step is None
    assert not stage._on_end
    assert not stage._on_idle
    del stage


def test_late_messages_of_an_earlier_step_are_ignored() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=2)
    x, target = batch(4)
    loss = pipe.step(x, target=target)
    rpc.rpc_sync("w2", requests.accept_inputs, (*pipe._rrefs[1].id, (1, True, False, 2), 0, (x[:2],), (True,)))
    rpc.rpc_sync("w1", requests.accept_gradients, (*pipe._rrefs[0].id, (1, True, False, 2), 0, (x[:2],), ()))
    assert pipe.step(x, target=target) == loss


# ---- inference, modes, state, optimizers


@SCHEDULES
def test_inference(schedule: Any) -> None:
    pipe = Pipeline(stages(["w1", "w0", "w2"]), micro_batches=4, schedule=schedule)
    for size in (1, 3, 8, 9):
        x, _ = batch(size)
        result = pipe(x)
        assert torch.allclose(result, one_process(3)(x), atol=1e-6)
        assert not result.requires_grad
    assert gradients(pipe) == [None] * 12
    with pytest.raises(ValueError, match="has no loss_fn"):
        pipe.step(x)


def test_modes_of_the_stages() -> None:
    pipe = Pipeline([("w1", nn.BatchNorm1d, (FEATURES,)), ("w2", nn.Dropout, (0.5,))], micro_batches=2)
    x, _ = batch(8)
    assert pipe.training
    assert (pipe(x) == 0).any()
    assert pipe.eval() is pipe
    assert not any(stage.training for stage in pipe.stages)
    assert torch.equal(pipe(x), pipe(x))
    assert not (pipe(x) == 0).any()


def test_state_is_saved_and_loaded() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), micro_batches=2)
    state = pipe.state_dict()
    assert list(state) == [f"stages.{name}" for name in one_process(2).state_dict()]
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    x, _ = batch(4)
    before = pipe(x)
    pipe.load_state_dict(zeros)
    assert not pipe(x).any()
    pipe.load_state_dict(state)
    assert torch.equal(pipe(x), before)


@SCHEDULES
def test_training_equals_one_process_bit_by_bit(schedule: Any) -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=4, schedule=schedule)
    optimizer = DistributedOptimizer(torch.optim.Adam, pipe.parameter_rrefs(), lr=0.05)
    model = one_process(2)
    mine = torch.optim.Adam(model.parameters(), lr=0.05)
    for number in range(5):
        x, target = batch(11, number)
        pipe.zero_grad()
        mine.zero_grad()
        loss = pipe.step(x, target=target)
        assert loss == step_here(model, x, target, micro_batches=4)
        optimizer.step()
        mine.step()
    for found, expected in zip(pipe.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(found, expected)


def test_zero_grad() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=2)
    x, target = batch(4)
    pipe.step(x, target=target)
    pipe.zero_grad(set_to_none=False)
    assert all(gradient is not None and not gradient.any() for gradient in gradients(pipe))
    pipe.zero_grad()
    assert gradients(pipe) == [None] * 8


def test_stages_in_all_forms() -> None:
    mine = layer(2)
    specs = [RemoteModule("w1", layer, (0,)), ("w2", layer, (), {"number": 1}), mine, ["rank:1/cpu", layer, (3,)]]
    pipe = Pipeline(specs, F.mse_loss, micro_batches=2)
    x, target = batch(4)
    assert torch.allclose(pipe(x), one_process(4)(x))
    assert [stage.on for stage in pipe.stages] == ["w1", "w2", "w0", 1]
    pipe.step(x, target=target)
    model = one_process(4)
    step_here(model, x, target, micro_batches=2)
    assert equal([parameter.grad for parameter in mine.parameters()], gradients_here(model[2]))
    assert [rref.owner_name() for rref in pipe.parameter_rrefs()] == [
        name for name in ("w1", "w2", "w0", "w1") for _ in range(4)
    ]


def test_times_of_a_step() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=3)
    assert pipe.times is None
    x, target = batch(6)
    pipe.step(x, target=target)
    times = pipe.times
    assert times is not None
    assert [" ".join(str(one.of) for one in stage) for stage in times.stages] == [
        "F0 F1 B0 F2 B1 B2",
        "F0 B0 F1 B1 F2 B2",
    ]
    assert all(one.begin <= one.end for stage in times.stages for one in stage)
    assert 0 < times.balanced_bubble < times.bubble < 1
    assert times.ideal_bubble == 1 / 4
