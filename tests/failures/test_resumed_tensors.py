"""Large tensors that are on their way when a connection breaks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from proxy_helpers import Proxy

from telegrad import rpc
from telegrad.errors import WorkerLost
from telegrad.rpc import Options
from telegrad.testing import Cluster, eventually

TIMEOUT = 20.0
N = 40_000  # elements: more than is copied, less than the sockets take
NOT_SENT_AGAIN = "memory may have changed since, so it was not sent again"

state: dict[str, Any] = {}


@pytest.fixture(params=["tcp", "tls"])
def options(request: pytest.FixtureRequest) -> Options:
    secret = "a secret of the group" if request.param == "tls" else None
    return Options(transports=("tcp",), rpc_timeout=TIMEOUT, secret=secret)


@pytest.fixture(autouse=True)
def clean_state(proxy: Proxy) -> Iterator[None]:
    """Give the handlers the proxy, and drop the tensors that they hold."""
    state["proxy"] = proxy
    yield
    state.clear()


def sent_by(w: Cluster, rank: int) -> int:
    return int(w[rank]._worker.engine.stats()["sent_messages"])


def has_replied(w: Cluster, sent: int) -> bool:
    return sent_by(w, 1) > sent and w[1]._worker.engine.stats()["running_handlers"] == 0


def send_result(w: Cluster, function: Callable[..., Any], *args: Any) -> "rpc.Future[Any]":
    """Call a function of w1 that freezes the network, and wait until it has replied."""
    sent = sent_by(w, 1)
    future: rpc.Future[Any] = w[0].rpc_async("w1", function, args)
    eventually(lambda: state["proxy"].frozen and has_replied(w, sent))
    return future


def break_connection(proxy: Proxy) -> None:
    proxy.reset()
    proxy.frozen = False


def values(n: int = N) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32)


# ---- results


def fresh() -> torch.Tensor:
    state["proxy"].freeze()
    return values()


def fresh_in_inference_mode() -> torch.Tensor:
    state["proxy"].freeze()
    with torch.inference_mode():
        return values()


async def fresh_of_a_coroutine() -> torch.Tensor:
    state["proxy"].freeze()
    return values()


def identity(x: torch.Tensor) -> torch.Tensor:
    state["proxy"].freeze()
    return x


@pytest.mark.parametrize("function", [fresh, fresh_in_inference_mode, fresh_of_a_coroutine])
def test_a_fresh_result_is_sent_again(w: Cluster, proxy: Proxy, function: Callable[[], torch.Tensor]) -> None:
    future = send_result(w, function)
    break_connection(proxy)
    assert torch.equal(future.wait(), values())


def test_an_argument_as_the_result_is_sent_again(w: Cluster, proxy: Proxy) -> None:
    future = send_result(w, identity, values())
    break_connection(proxy)
    assert torch.equal(future.wait(), values())


def held(kind: str = "tensor") -> Any:
    """Return a tensor that the worker keeps, in a value of some kind."""
    state["proxy"].freeze()
    x = state["held"]
    return {
        "tensor": x,
        "view": x[10:].view(-1, 10),
        "with small ones": (x, torch.ones(3), {"step": torch.tensor(1)}),
        "pickled": {frozenset((1, 2)): x},
        "pickled aliases": [x, x[: N // 2], frozenset()],
    }[kind]


KINDS = ["tensor", "view", "with small ones", "pickled", "pickled aliases"]


def tensor_in(result: Any) -> torch.Tensor:
    if isinstance(result, dict):
        (result,) = result.values()
    return result[0] if isinstance(result, (tuple, list)) else result  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_an_unchanged_result_is_sent_again(w: Cluster, proxy: Proxy, kind: str) -> None:
    state["held"] = values()
    future = send_result(w, held, kind)
    break_connection(proxy)
    expected = values()[10:].view(-1, 10) if kind == "view" else values()
    assert torch.equal(tensor_in(future.wait()), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_result_is_not_sent_again(w: Cluster, proxy: Proxy, kind: str) -> None:
    """The program writes one element, in another view than the one that was sent."""
    state["held"] = values()
    future = send_result(w, held, kind)
    state["held"][N // 2 - 5 :][0] = -1.0
    break_connection(proxy)
    with pytest.raises(WorkerLost, match=NOT_SENT_AGAIN):
        future.wait()
    assert w[0].rpc_sync("w1", abs, (-1,)) == 1


def test_a_result_that_was_changed_and_dropped_is_not_sent_again(w: Cluster, proxy: Proxy) -> None:
    state["held"] = values()
    future = send_result(w, held)
    state.pop("held").add_(1)
    break_connection(proxy)
    with pytest.raises(WorkerLost, match=NOT_SENT_AGAIN):
        future.wait()


def test_a_result_that_has_given_back_its_memory_is_not_sent_again(w: Cluster, proxy: Proxy) -> None:
    """The memory is no longer mapped."""
    state["held"] = values()
    future = send_result(w, held)
    state["held"].untyped_storage().resize_(0)
    break_connection(proxy)
    with pytest.raises(WorkerLost, match=NOT_SENT_AGAIN):
        future.wait()
    assert w[0].rpc_sync("w1", abs, (-1,)) == 1


@pytest.mark.parametrize("kind", ["tensor", "pickled"])
def test_a_change_that_pytorch_does_not_count_is_found_by_samples(w: Cluster, proxy: Proxy, kind: str) -> None:
    state["held"] = values()
    future = send_result(w, held, kind)
    state["held"].data.add_(1)
    break_connection(proxy)
    with pytest.raises(WorkerLost, match=NOT_SENT_AGAIN):
        future.wait()


def sent() -> Any:
    state["proxy"].freeze()
    return state["sent"]


def test_tensors_of_one_memory_may_have_several_versions(w: Cluster, proxy: Proxy) -> None:
    state["held"] = values()
    state["other"] = state["held"].data
    state["sent"] = [state["held"], state["other"], frozenset()]
    future = send_result(w, sent)
    state["other"][7] = -1.0
    break_connection(proxy)
    with pytest.raises(WorkerLost, match=NOT_SENT_AGAIN):
        future.wait()


def test_a_result_of_inference_that_the_worker_keeps_is_not_sent_again(w: Cluster, proxy: Proxy) -> None:
    """Its changes are not counted."""
    with torch.inference_mode():
        state["held"] = values()
    future = send_result(w, held)
    break_connection(proxy)
    with pytest.raises(WorkerLost, match=NOT_SENT_AGAIN):
        future.wait()


def parameter() -> torch.Tensor:
    state["proxy"].freeze()
    return state["weight"]  # type: ignore[no-any-return]


def test_a_parameter_is_sent_again_until_the_optimizer_steps(w: Cluster, proxy: Proxy) -> None:
    for steps in (False, True):
        weight = state["weight"] = torch.nn.Parameter(values())
        weight.grad = torch.zeros(N)
        weight.grad[7] = 1.0  # no sample
        future = send_result(w, parameter)
        if steps:
            torch.optim.SGD([weight], lr=0.5).step()
        break_connection(proxy)
        if steps:
            with pytest.raises(WorkerLost, match=NOT_SENT_AGAIN):
                future.wait()
        else:
            assert torch.equal(future.wait().detach(), values())


def test_a_result_survives_several_breaks(w: Cluster, proxy: Proxy) -> None:
    """Further connections break before the copy has arrived."""
    state["held"] = values()
    future = send_result(w, held)
    proxy.reset()
    eventually(lambda: not w[1]._worker.engine.stats()["running_requests"])
    accepted = proxy.accepted
    eventually(lambda: proxy.accepted > accepted)
    for _ in range(3):
        proxy.reset()
    proxy.frozen = False
    assert torch.equal(future.wait(), values())


# ---- arguments


def total(x: torch.Tensor) -> float:
    return float(x.double().sum())


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_arguments_of_asynchronous_calls(w: Cluster, proxy: Proxy, pickled: bool, changes: bool) -> None:
    x = values()
    proxy.freeze()
    argument = {frozenset(): x} if pickled else {0: x}
    future = w[0].rpc_async("w1", total_of_values, (argument,))
    if changes:
        x[5] = -1.0
    break_connection(proxy)
    if changes:
        with pytest.raises(WorkerLost, match=NOT_SENT_AGAIN):
            future.wait()
    else:
        assert future.wait() == total(values())


def total_of_values(x: dict[object, torch.Tensor]) -> float:
    return sum(map(total, x.values()))


def test_arguments_of_a_creation(w: Cluster, proxy: Proxy) -> None:
    x = values()
    proxy.freeze()
    made = w[0].remote("w1", torch.clone, (x,))
    break_connection(proxy)
    assert torch.equal(made.to_here(), values())
    del made
    eventually(lambda: w[1]._worker.references.leaks() == [])
