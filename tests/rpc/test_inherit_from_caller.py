"""The option inherit_from_caller: deadline and torch state of handlers."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import RpcTimeout, RRefTimeout
from telegrad.testing import Cluster, cluster, eventually
from telegrad.worker.scope import Scope, current

pytestmark = pytest.mark.filterwarnings("error")

TIMEOUT = 0.5  # longer than a busy machine takes to run the request


@pytest.fixture(scope="module", params=[True, False], ids=["inherits", "independent"])
def workers(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with cluster(3, rpc.Options(inherit_from_caller=request.param)) as group:
        yield group


@pytest.fixture
def inherits(request: pytest.FixtureRequest, workers: Cluster) -> bool:
    return bool(request.node.callspec.params["workers"])


made: dict[str, Any] = {}
"""Results of the calls of `run_late` by name; None for those that timed out."""


def run_late() -> None:
    """Make calls once the deadline of the request has passed."""
    eventually(rpc.cancelled)  # in both settings
    for name, call in CALLS.items():
        try:
            made[name] = call()
        except (RpcTimeout, RRefTimeout):
            made[name] = None


def double(x: int) -> int:
    return 2 * x


def items() -> Iterator[int]:
    yield 2


def pass_over_workers() -> int:
    with autograd.context() as context:
        weight = torch.ones(1, requires_grad=True)
        autograd.backward(context, [rpc.rpc_sync("w2", torch.add, (weight, 1)).sum()])
        return 2 * int(autograd.get_gradients(context)[weight])


CALLS: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("w2", double, (1,)),
    "rpc_async": lambda: rpc.rpc_async("w2", double, (1,)).wait(),
    "then": lambda: rpc.rpc_async("w2", double, (1,)).then(lambda _: rpc.rpc_sync("w2", double, (1,))).wait(),
    "multicast": lambda: rpc.multicast(["w2"], double, (1,))[0].wait(),
    "stream": lambda: next(iter(rpc.stream("w2", items))),
    "retry": lambda: rpc.rpc_sync("w2", double, (1,), retry=rpc.Retry(attempts=2)),
    "remote": lambda: rpc.remote("w2", double, (1,)).to_here(),
    "backward": pass_over_workers,
}


@pytest.mark.parametrize("start", [rpc.rpc_async, rpc.remote], ids=["call", "creation"])
def test_nested_calls_after_the_deadline(workers: Cluster, inherits: bool, start: Callable[..., object]) -> None:
    made.clear()
    with workers[0]:
        started = start("w1", run_late, timeout=TIMEOUT)
        eventually(lambda: len(made) == len(CALLS))
        del started
    assert made == dict.fromkeys(CALLS, None if inherits else 2)


scopes: list[Scope | None] = []


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda _: scopes.append(current.get()))
    return y


def test_hooks_of_backward_passes(workers: Cluster, inherits: bool) -> None:
    scopes.clear()
    with workers[0], autograd.context() as context:
        y = rpc.rpc_sync("w1", hooked, (torch.ones(1, requires_grad=True),))
        autograd.backward(context, [y.sum()])
    (scope,) = scopes
    assert scope is not None
    assert scope.deadline > 0
    assert scope.limits_calls is inherits


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
}


def state() -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


async def state_of_coroutine() -> tuple[bool, bool, bool]:
    return state()


def states() -> Iterator[tuple[bool, bool, bool]]:
    yield state()


WAYS: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("w1", state),
    "rpc_async": lambda: rpc.rpc_async("w1", state).wait(),
    "remote": lambda: rpc.remote("w1", state).to_here(),
    "coroutine": lambda: rpc.rpc_sync("w1", state_of_coroutine),
    "stream": lambda: next(iter(rpc.stream("w1", states))),
    "multicast": lambda: rpc.multicast(["w1"], state)[0].wait(),
}


@pytest.mark.parametrize("within", [contextlib.nullcontext, autograd.context], ids=["plain", "context"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_torch_state_of_handlers(workers: Cluster, inherits: bool, mode: str, way: str, within: Any) -> None:
    with workers[0], within(), MODES[mode]():
        expected = state() if inherits else (True, False, False)
        assert WAYS[way]() == expected


def train() -> bool:
    model = torch.nn.Linear(2, 1)
    loss = model(torch.ones(1, 2)).sum()
    if loss.requires_grad:
        loss.backward()
    return model.weight.grad is not None


def loss_with(reference: rpc.RRef[torch.Tensor]) -> bool:
    weight = torch.ones(3, requires_grad=True)
    (weight * reference.local_value()).sum().backward()
    return weight.grad is not None


def test_handlers_train_while_the_caller_records_nothing(workers: Cluster, inherits: bool) -> None:
    with workers[0]:
        with torch.no_grad():
            assert rpc.rpc_sync("w1", train) is not inherits
        with torch.inference_mode():
            created = rpc.remote("w1", torch.zeros, (3,))
            created.to_here()
        if inherits:
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
                rpc.rpc_sync("w1", loss_with, (created,))
        else:
            assert rpc.rpc_sync("w1", loss_with, (created,))


def grown(x: torch.Tensor) -> torch.Tensor:
    return x * torch.ones(3, requires_grad=True)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_results_are_not_recorded_for_a_caller_without_gradients(workers: Cluster, mode: str) -> None:
    with workers[0], autograd.context() as context:
        with MODES[mode]():
            result = rpc.rpc_sync("w1", grown, (torch.ones(3),))
        assert result.grad_fn is None
        weight = torch.ones(3, requires_grad=True)
        autograd.backward(context, [(weight * rpc.rpc_sync("w1", grown, (weight,))).sum()])
        assert torch.equal(autograd.get_gradients(context)[weight], torch.full((3,), 2.0))


def interceptor(call: rpc.InterceptedCall, proceed: Callable[[rpc.InterceptedCall], Any]) -> Any:
    return proceed(call)


def test_intercepted_handlers_have_the_same_state(workers: Cluster, inherits: bool) -> None:
    with workers[0], rpc.intercept(interceptor), torch.no_grad():
        assert rpc.rpc_sync("w1", state)[0] is not inherits
        assert rpc.rpc_sync("w1", state_of_coroutine)[0] is not inherits
