"""Pipelines as modules: changes of all stages, and what is refused."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_helpers import Gate, Gated, batch, gates, layer, stages
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.worker.default_worker import open_worker

pytestmark = pytest.mark.usefixtures("clean")


class Scaled(RemoteModule):
    """Remote module with a forward of its own."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 0


class Named(RemoteModule):
    """Remote module with a method of its own only."""

    def title(self) -> str:
        return "named"


def test_a_stage_with_a_forward_on_this_worker_is_refused() -> None:
    with pytest.raises(TypeError, match=r"stage 1 of a pipeline is a Scaled with a forward of its own, in Scaled"):
        Pipeline([("w1", layer, (0,)), Scaled("w2", layer, (1,))])
    x = batch(4)[0]
    assert Pipeline([Named("w1", layer, (0,))])(x).shape == x.shape


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_stage_with_hooks_on_this_worker_is_refused(register: str) -> None:
    module = RemoteModule("w1", layer, (0,))
    handle = getattr(module, register)(lambda *_: None)
    with pytest.raises(TypeError, match="stage 0 of a pipeline is a RemoteModule with hooks"):
        Pipeline([module])
    handle.remove()
    Pipeline([module])


def test_changes_apply_to_all_stages() -> None:
    pipe = Pipeline(stages(["w1", "w2"]), F.mse_loss, micro_batches=2)
    assert pipe.requires_grad_(False) is pipe
    assert not any(rref.to_here().requires_grad for rref in pipe.parameter_rrefs())
    pipe.requires_grad_(True)
    for change, dtype in ((pipe.double, torch.float64), (lambda: pipe.to(torch.float32), torch.float32)):
        assert change() is pipe
        assert {value.dtype for value in pipe.state_dict().values()} == {dtype}
    x, target = batch(4)
    assert pipe.double().step(x.double(), target=target.double()).dtype == torch.float64


def test_what_has_no_effect_is_refused() -> None:
    pipe = Pipeline(stages(["w1", "w2"]))
    for name in ("parameters", "named_parameters", "buffers", "named_buffers", "cuda", "cpu", "share_memory"):
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for Pipeline"):
            getattr(pipe, name)()
    with pytest.raises(ValueError, match="Method ``to`` not supported for Pipeline"):
        pipe.to("cpu")
    assert list(pipe.parameters(recurse=False)) == []
    assert [name for name, _ in nn.Sequential(pipe, nn.Linear(2, 2)).named_parameters()] == ["1.weight", "1.bias"]
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        DistributedOptimizer(torch.optim.SGD, [], lr=0.1)
    with pytest.raises(TypeError, match="stage 0 of a pipeline is a Pipeline"):
        Pipeline([pipe])


def test_a_change_during_a_step_is_refused() -> None:
    pipe = Pipeline([("w1", Gated, ("first",))], F.mse_loss, micro_batches=2)
    x, target = batch(4)
    gate, worker = gates.setdefault("first", Gate()), open_worker()

    def step() -> None:
        with worker:
            pipe.step(x, target=target)

    thread = threading.Thread(target=step)
    thread.start()
    assert gate.entered.wait(30)
    with pytest.raises(RuntimeError, match="a step of this pipeline is running"):
        pipe.double()
    gate.opened.set()
    thread.join()
    gates.clear()


# ---- arguments that are noticed early


@pytest.mark.parametrize("number", [2.0, True, "2"])
def test_a_number_of_micro_batches_that_is_no_int(number: Any) -> None:
    with pytest.raises(TypeError, match="micro_batches has to be an int, and is"):
        Pipeline(stages(["w1"]), micro_batches=number)


async def async_loss(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target)


@pytest.mark.parametrize(
    ("loss_fn", "text"), [(5, "has to be callable, and 5 is not"), (async_loss, "has to be a plain function")]
)
def test_a_loss_function_that_is_none(loss_fn: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"loss_fn of a pipeline {text}"):
        Pipeline(stages(["w1"]), loss_fn)


def test_a_timeout_that_is_no_number() -> None:
    pipe, scaler = Pipeline(stages(["w1"]), F.mse_loss, micro_batches=2), torch.amp.GradScaler("cpu")
    x, target = batch(4)
    with pytest.raises(TypeError, match=r"timeout has to be a number of seconds.*not 'x'"):
        pipe.step(x, target=target, timeout="x", scaler=scaler)  # type: ignore[call-overload]
    assert pipe._number == 0
    assert scaler._scale is None


@pytest.mark.parametrize("is_local", [False, True])
def test_the_same_module_as_two_stages(is_local: bool) -> None:
    module = layer(0) if is_local else RemoteModule("w1", layer, (0,))
    with pytest.raises(ValueError, match="stages 0 and 2 of a pipeline are the same module: two stages share no"):
        Pipeline([module, ("w2", layer, (1,)), module])


def test_a_local_module_without_parameters_as_two_stages() -> None:
    tanh = nn.Tanh()
    x = batch(4)[0]
    assert torch.equal(Pipeline([tanh, tanh], micro_batches=2)(x), x.tanh().tanh())


class Async(nn.Module):
    async def forward(self, x: Tensor) -> Tensor:
        return x


class Generates(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield x


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", [Async, Generates])
def test_a_stage_without_an_ordinary_forward(kind: type[nn.Module]) -> None:
    with pytest.raises(TypeError, match=f"stage 1 of a pipeline has a {kind.__name__}, with a forward that is"):
        Pipeline([("w1", layer, (0,)), ("w2", kind)])


runs: list[str] = []
"""Workers of the passes that have run."""


class Notes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        runs.append(rpc.get_worker_info().name)
        return super().forward(x)


def test_an_input_from_a_context_is_refused_before_the_step() -> None:
    runs.clear()
    pipe = Pipeline([("w1", Notes, (6, 6))], F.mse_loss, micro_batches=2)
    x, target = batch(4)
    weight = torch.ones(1, requires_grad=True)
    with autograd.context():
        received = rpc.rpc_sync("w1", torch.mul, (x, weight))
        with pytest.raises(RuntimeError, match="was received in an autograd context"):
            pipe.step(received * 2, target=target)
        assert runs == []
        pipe.step(received.detach(), target=target)
    with autograd.plain():
        received = rpc.rpc_sync("w1", torch.mul, (x, weight))
    pipe.step(received * 2, target=target)
    assert weight.grad is not None
