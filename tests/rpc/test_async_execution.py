"""Handlers with `async_execution` reply when their future completes.

They hold no thread until then.
"""

import threading
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.functions import async_execution
from telegrad.testing import Gate, cluster

pytestmark = [
    pytest.mark.usefixtures("clean", "quiet"),
    pytest.mark.filterwarnings("error", "ignore:`torch.jit:DeprecationWarning"),
]


def echo(x: Any) -> Any:
    return x


@async_execution
def add_there(to: str, x: Any, y: Any) -> Any:
    return rpc.rpc_async(to, echo, (x,)).then(lambda done: done.value() + y)


class Forms:
    def __init__(self, n: int = 10) -> None:
        self.n = n

    @async_execution
    def bound(self, to: str, x: int) -> Any:
        return rpc.rpc_async(to, echo, (x,)).then(lambda done: done.value() + self.n)

    @staticmethod
    @async_execution
    def static_outside(to: str, x: int) -> Any:
        return add_there(to, x, 1)

    @async_execution
    @staticmethod
    def static_inside(to: str, x: int) -> Any:
        return add_there(to, x, 2)

    @classmethod
    @async_execution
    def class_outside(cls, to: str, x: int) -> Any:
        return add_there(to, x, 3)

    @async_execution
    @classmethod
    def class_inside(cls, to: str, x: int) -> Any:
        return add_there(to, x, 4)


def call(how: str, function: Any, *args: Any) -> Any:
    if how == "sync":
        return rpc.rpc_sync("w1", function, args)
    if how == "async":
        return rpc.rpc_async("w1", function, args).wait()
    return rpc.remote("w1", function, args).to_here()


@pytest.mark.parametrize("how", ["sync", "async", "remote"])
@pytest.mark.parametrize("to", ["w0", "w1"])
def test_all_forms(how: str, to: str) -> None:
    assert call(how, add_there, to, 1, 2) == 3
    assert torch.equal(call(how, add_there, to, torch.ones(2), 1), torch.full((2,), 2.0))
    for form in (Forms(), Forms):
        assert call(how, form.static_outside, to, 1) == 2
        assert call(how, form.static_inside, to, 1) == 3
        assert call(how, form.class_outside, to, 1) == 4
        assert call(how, form.class_inside, to, 1) == 5
    assert call(how, Forms(5).bound, to, 1) == 6
    assert call(how, Forms.bound, Forms(6), to, 1) == 7


@pytest.mark.parametrize("proxy", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("name", ["bound", "static_outside", "static_inside", "class_outside", "class_inside"])
def test_methods_through_a_reference(proxy: str, name: str) -> None:
    rref = rpc.remote("w1", Forms, (0,))
    got = getattr(getattr(rref, proxy)(), name)("w0", 1)
    got = got.wait() if proxy == "rpc_async" else got.to_here() if proxy == "remote" else got
    expected = 1 + ["bound", "static_outside", "static_inside", "class_outside", "class_inside"].index(name)
    assert got == expected


def test_a_local_function() -> None:
    @async_execution
    def local(x: int) -> Any:
        done: torch.futures.Future[int] = torch.futures.Future()
        done.set_result(x + 1)
        return done

    assert rpc.rpc_sync("w1", local, (1,)) == 2


def slow_add(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@async_execution
@torch.jit.script
def scripted(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(slow_add, x)


@pytest.mark.parametrize("how", ["sync", "async", "remote"])
def test_over_a_scripted_function(how: str) -> None:
    assert torch.equal(call(how, scripted, torch.ones(2)), torch.full((2,), 2.0))


@async_execution
def no_future(x: int) -> Any:
    return x


@pytest.mark.parametrize("how", ["sync", "async", "remote"])
def test_a_result_that_is_no_future_raises(how: str) -> None:
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future object, but got builtins\.int"):
        call(how, no_future, 1)


@async_execution
def raises_at_once() -> Any:
    raise KeyError("at once")


@async_execution
def raises_later(to: str) -> Any:
    return rpc.rpc_async(to, raise_here)


@async_execution
def raises_in_callback(to: str) -> Any:
    return rpc.rpc_async(to, echo, (1,)).then(raise_here)


@async_execution
def sets_an_error() -> Any:
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_exception(KeyError("set"))
    return done


def raise_here(*_: Any) -> None:
    raise KeyError("here")


@pytest.mark.parametrize("how", ["sync", "async", "remote"])
def test_errors(how: str) -> None:
    with pytest.raises(KeyError, match="at once"):
        call(how, raises_at_once)
    with pytest.raises(KeyError, match="here"):
        call(how, raises_later, "w0")
    with pytest.raises(KeyError, match="set"):
        call(how, sets_an_error)
    with pytest.raises(RuntimeError, match="here"):  # torch's `then` keeps the text of an error, not its type
        call(how, raises_in_callback, "w0")


def test_a_local_call_runs_the_function() -> None:
    assert add_there("w1", 1, 2).wait() == 3
    assert Forms.static_outside("w1", 1).wait() == 2
    assert Forms(1).bound("w1", 1).wait() == 2


class Batcher:
    """Batching: requests wait for each other, and one result serves all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.inputs: list[Any] = []
        self.lock = threading.Lock()

    @staticmethod
    @async_execution
    def run(rref: Any, x: Any) -> Any:
        self = rref.local_value()
        with self.lock:
            position = len(self.inputs)
            self.inputs.append(x)
            future = self.future
            answer = future.then(lambda done: done.value()[position])
            if len(self.inputs) == self.size:
                inputs, self.inputs, self.future = self.inputs, [], torch.futures.Future()
                future.set_result(torch.stack(inputs) * 2)
        return answer


def test_requests_waiting_for_each_other_hold_no_threads() -> None:
    with cluster(2, rpc.Options(num_worker_threads=1)):
        batcher = rpc.remote("w1", Batcher, (64,))
        for _ in range(3):
            futures = [rpc.rpc_async("w1", Batcher.run, (batcher, torch.tensor(float(i)))) for i in range(64)]
            assert [f.wait().item() for f in futures] == [2.0 * i for i in range(64)]
        del batcher


pending: list[torch.futures.Future[Any]] = []


@async_execution
def hands_out(gate: Gate) -> Any:
    pending.append(torch.futures.Future())
    gate.entered.release()
    return pending[-1]


def test_the_future_may_complete_in_any_thread_at_any_time() -> None:
    gate = Gate()
    future = rpc.rpc_async("w1", hands_out, (gate,))
    gate.wait_for()
    assert rpc.rpc_sync("w1", echo, (1,)) == 1
    thread = threading.Thread(target=lambda: pending.pop().set_result("from elsewhere"))
    thread.start()
    assert future.wait() == "from elsewhere"
    thread.join()


def test_a_future_completes_after_the_timeout() -> None:
    gate = Gate()
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        rpc.rpc_sync("w1", hands_out, (gate,), timeout=0.05)
    gate.wait_for()
    pending.pop().set_result("too late")
    assert rpc.rpc_sync("w1", echo, (1,)) == 1
