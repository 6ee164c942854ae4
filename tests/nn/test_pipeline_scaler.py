"""Steps of pipelines with a scaler for mixed precision."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_helpers import batch, equal, gradients, gradients_here, layer, one_process, stages, step_here
from torch import Tensor, nn

from telegrad import optim, rpc
from telegrad.nn import Pipeline
from telegrad.optim import DistributedOptimizer

pytestmark = pytest.mark.usefixtures("clean")

SCHEDULES = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
SCALE = 1000.0  # no power of two, so that scaling rounds


def parameters(module: nn.Module) -> list[Tensor]:
    return list(module.state_dict().values())


@SCHEDULES
@pytest.mark.parametrize("places", [["w1"], ["w0", "w1"], ["w1", "w2", "w1"]], ids="-".join)
def test_training_equals_one_process_bit_by_bit(schedule: Any, places: list[str]) -> None:
    pipe = Pipeline(stages(places), F.mse_loss, micro_batches=3, schedule=schedule)
    model = one_process(len(places))
    optimizer = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1)
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = optim.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    expected = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    before = [parameter.clone() for parameter in parameters(model)]
    for number in range(4):
        x, target = batch(8, number)
        if number == 2:
            target[5] = torch.inf  # in the second micro-batch: no optimizer steps
        pipe.zero_grad()
        local.zero_grad()
        loss = pipe.step(x, target=target, scaler=scaler)
        assert loss == step_here(model, x, target, 3, scaler=expected)
        if number != 2:
            assert equal(gradients(pipe), gradients_here(model))
        for each, stepped in ((scaler, optimizer), (expected, local)):
            each.step(stepped)
            each.update()
        assert scaler.get_scale() == expected.get_scale()
    assert scaler.get_scale() == SCALE  # doubled after two steps, halved after the one that overflowed
    assert equal(parameters(pipe), parameters(model))
    assert not any(torch.equal(one, other) for one, other in zip(before, parameters(model), strict=True))


def test_gradients_are_scaled_and_the_loss_is_not() -> None:
    x, target = batch(6)
    results = []
    for scaler in (None, optim.GradScaler("cpu", init_scale=8.0), optim.GradScaler("cpu", enabled=False)):
        pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=2)
        inputs = x.clone().requires_grad_()
        loss, outputs = pipe.step(inputs, target=target, outputs=True, scaler=scaler)
        results.append((loss, outputs, [*gradients(pipe), inputs.grad]))
    plain, scaled, disabled = results
    assert plain[0] == scaled[0] == disabled[0]
    assert torch.equal(plain[1], scaled[1])
    assert equal(scaled[2], [gradient * 8 for gradient in plain[2] if gradient is not None])  # no rounding: 8 is 2^3
    assert equal(disabled[2], plain[2])


def test_torchs_own_scaler_steps_a_local_optimizer() -> None:
    modules = [layer(0), layer(1)]
    pipe = Pipeline(modules, F.mse_loss, micro_batches=2)
    model = one_process(2)
    scaler, expected = (torch.amp.GradScaler("cpu", init_scale=SCALE) for _ in range(2))
    x, target = batch(6)
    pipe.step(x, target=target, scaler=scaler)
    step_here(model, x, target, 2, scaler=expected)
    scaler.step(torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1))
    expected.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert equal([p for module in modules for p in module.parameters()], list(model.parameters()))


def test_something_else_as_a_scaler() -> None:
    pipe = Pipeline(stages(["w1"]), F.mse_loss, micro_batches=2)
    x, target = batch(4)
    names: list[str] = []
    with rpc.intercept(client=lambda call, proceed: names.append(call.name) or proceed(call)):
        wrong: Any = 8.0
        with pytest.raises(TypeError, match=r"scaler has to be a GradScaler, .*, and is 8\.0"):
            pipe.step(x, target=target, scaler=wrong)
    assert names == []
