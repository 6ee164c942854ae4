"""Torch's private functions that programs call do what torch's do."""

import threading
from typing import Any

import pytest
import torch
from torch import nn, optim

from telegrad.compat import autograd, rpc
from telegrad.compat.nn import _create_module, _create_module_with_interface, _param_rrefs
from telegrad.compat.optim import _local_optimizer_step, _LocalOptimizer, _new_local_optimizer, _wait_for_all
from telegrad.compat.rpc import api, internal
from telegrad.testing import Cluster, Gate, eventually

UNSET = rpc.constants._UNSET_RPC_TIMEOUT
X = torch.ones(2)


@torch.jit.script
def scripted(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.jit.script
def scripted_later(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:  # type: ignore[name-defined]
    return torch.jit.fork(torch.neg, x)  # type: ignore[no-any-return]


def add(x: Any, y: Any = 1) -> Any:
    return x + y


def later(x: Any) -> Any:
    future = torch.futures.Future[Any]()
    future.set_result(x)
    return future


def fail() -> None:
    raise LookupError("not here")


def info(to: str = "w1") -> rpc.WorkerInfo:
    return api._to_worker_info(to)


# ---- calls


@pytest.mark.usefixtures("two")
def test_an_operator_by_its_name() -> None:
    future = rpc._invoke_rpc_builtin(info(), "aten::add", UNSET, X, other=X, alpha=2)
    assert torch.equal(future.wait(), X * 3)
    rref = rpc._invoke_remote_builtin(info(), "aten::add", UNSET, X, 1)
    assert torch.equal(rref.to_here(), X + 1)
    for invoke in (rpc._invoke_rpc_builtin, rpc._invoke_remote_builtin):
        with pytest.raises(RuntimeError, match="no operator 'aten::nothing'"):
            invoke(info(), "aten::nothing", UNSET)


@pytest.mark.usefixtures("two")
def test_an_operator_by_its_name_is_recorded() -> None:
    x = X.clone().requires_grad_()
    with autograd.context() as context:
        loss = rpc._invoke_rpc_builtin(info(), "aten::mul", UNSET, x, 3).wait().sum()
        autograd.backward(context, [loss])
        assert torch.equal(autograd.get_gradients(context)[x], X * 3)


@pytest.mark.usefixtures("two")
def test_a_pickled_call() -> None:
    pickled, tensors = internal.serialize(internal.PythonUDF(add, (X,), {"y": X}))
    assert torch.equal(rpc._invoke_rpc_python_udf(info(), pickled, tensors, UNSET, False).wait(), X + X)
    assert torch.equal(rpc._invoke_remote_python_udf(info(), pickled, tensors, UNSET, False).to_here(), X + X)
    pickled, tensors = internal.serialize(internal.PythonUDF(later, (5,), {}))
    assert rpc._invoke_rpc_python_udf(info(), pickled, tensors, UNSET, True).wait() == 5
    assert rpc._invoke_remote_python_udf(info(), pickled, tensors, UNSET, True).to_here() == 5
    gone = pickled.replace(b"later", b"gone!")
    with pytest.raises(AttributeError, match="Ensure that UDFs are defined"):
        rpc._invoke_rpc_python_udf(info(), gone, tensors, UNSET, False).wait()


@pytest.mark.usefixtures("two")
def test_a_scripted_function_by_its_name() -> None:
    name = torch._jit_internal._qualified_name(scripted)  # type: ignore[no-untyped-call]
    assert torch.equal(rpc._invoke_rpc_torchscript("w1", name, (X,), {"factor": 2.0}, UNSET, False).wait(), X * 2)
    assert torch.equal(rpc._invoke_remote_torchscript("w1", name, UNSET, False, X, factor=3.0).to_here(), X * 3)
    name = torch._jit_internal._qualified_name(scripted_later)  # type: ignore[no-untyped-call]
    assert torch.equal(rpc._invoke_rpc_torchscript("w1", name, (X,), {}, UNSET, True).wait(), -X)
    with pytest.raises(RuntimeError, match=r"no scripted function '__torch__.gone' on worker w0"):
        rpc._invoke_rpc_torchscript("w1", "__torch__.gone", (), {}, UNSET, False)
    with pytest.raises(RuntimeError, match=r"no scripted function '__torch__.gone'"):
        rpc._invoke_remote_torchscript("w1", "__torch__.gone", UNSET, False)


@pytest.mark.usefixtures("two")
def test_any_call() -> None:
    for mode in internal.RPCExecMode:
        assert api._invoke_rpc("w1", add, mode, (1,), {"y": 2}).wait() == 3
    with pytest.raises(TypeError, match="function should be callable"):
        api._invoke_rpc("w1", 5, internal.RPCExecMode.SYNC)
    with torch.autograd.profiler.profile() as profile:
        api._invoke_rpc("w1", add, internal.RPCExecMode.SYNC, (1,)).wait()
    assert "rpc_sync#add(w0 -> w1)" in {event.name for event in profile.function_events}


@pytest.mark.usefixtures("two")
def test_what_a_pickled_call_becomes() -> None:
    assert internal._run_function(internal.PythonUDF(add, (1,), {"y": 2})) == 3
    failed = internal._run_function(internal.PythonUDF(fail, (), {}))
    assert failed.exception_type is LookupError
    assert failed.msg.startswith("On WorkerInfo(id=0, name=w0):\nLookupError('not here')\nTraceback")
    with pytest.raises(LookupError, match="not here"):
        internal._handle_exception(failed)
    internal._handle_exception(3)
    assert internal._run_function(AttributeError("no such function")).exception_type is AttributeError

    class Odd(Exception):
        def __init__(self) -> None:
            super().__init__()

    with pytest.raises(RuntimeError, match="Failed to create original exception type"):
        internal._handle_exception(internal.RemoteException("text", Odd))


# ---- the agent


def wait_for(gate: Gate) -> None:
    gate.enter()


def test_metrics(two: Cluster) -> None:
    keys = ("thread_pool_size", "num_idle_threads", "client_active_calls", "server_active_calls")
    caller, callee = (rpc.TensorPipeAgent(worker._worker) for worker in (two[0], two[1]))

    def metrics(agent: Any) -> dict[str, int]:
        found = agent.get_metrics()
        assert set(found) == {f"agent.{key}" for key in (*keys, "server_active_async_calls")}
        assert {type(value) for value in found.values()} == {str}
        return {key.removeprefix("agent."): int(value) for key, value in found.items()}

    assert metrics(callee)["thread_pool_size"] == two[1]._worker.options.num_worker_threads
    # A thread counts as running until it has sent its reply and come back, which the caller does not wait for.
    eventually(lambda: metrics(callee)["server_active_calls"] == 0)
    gate = Gate()
    blocked = rpc.rpc_async("w1", wait_for, (gate,))
    eventually(lambda: metrics(callee)["server_active_calls"] == 1)
    assert metrics(callee)["server_active_async_calls"] == 0
    assert metrics(caller)["client_active_calls"] == 1
    gate.open()
    blocked.wait()
    eventually(lambda: metrics(callee)["server_active_calls"] == 0)
    assert metrics(caller)["client_active_calls"] == 0
    assert set(callee.get_metrics()) < set(callee.get_debug_info())


_pending: list[Any] = []


@rpc.functions.async_execution
def held() -> Any:
    _pending.append(torch.futures.Future())
    return _pending[-1]


async def held_in_a_coroutine() -> None:
    future: Any = torch.futures.Future()
    _pending.append(future)
    import asyncio

    while not future.done():
        await asyncio.sleep(0.001)


@rpc.functions.async_execution
def not_a_future() -> Any:
    return 5


@pytest.mark.parametrize("function", [held, held_in_a_coroutine])
def test_metrics_count_calls_with_deferred_results(two: Cluster, function: Any) -> None:
    agent = rpc.TensorPipeAgent(two[1]._worker)

    def active(key: str) -> int:
        return int(agent.get_metrics()[f"agent.server_active{key}_calls"])

    waiting = [rpc.rpc_async("w1", function), rpc.remote("w1", function)]
    eventually(lambda: active("_async") == active("") == 2 and len(_pending) == 2)
    while _pending:
        _pending.pop().set_result(None)
    waiting[0].wait()
    waiting[1].to_here()
    with pytest.raises(RuntimeError, match="must return a torch"):
        rpc.rpc_sync("w1", not_a_future)
    eventually(lambda: active("_async") == active("") == 0)


# ---- modules and optimizers


@pytest.mark.usefixtures("two")
def test_parts_of_remote_modules() -> None:
    module = _create_module(nn.Linear, (2, 1), {}, "cpu")
    assert isinstance(module, nn.Linear)
    rref = _create_module_with_interface(nn.Linear, (2, 1), {}, "cpu", None)
    assert [tuple(p.local_value().shape) for p in _param_rrefs(rref, True)] == [(1, 2), (1,)]


@pytest.mark.usefixtures("two")
def test_parts_of_distributed_optimizers() -> None:
    parameter = nn.Parameter(X.clone())
    local = rpc.rpc_sync("w0", _new_local_optimizer, (optim.SGD, [rpc.RRef(parameter)]), {"lr": 0.5})
    part = local.local_value()
    assert isinstance(part, _LocalOptimizer)
    assert isinstance(part.optim, optim.SGD)
    with autograd.context() as context:
        autograd.backward(context, [(parameter * 2).sum()])
        rpc.rpc_sync("w0", _local_optimizer_step, (local, context))
    assert torch.equal(parameter, X - 1)
    failing = [rpc.rpc_async("w1", function) for function in (fail, threading.active_count)]
    with pytest.raises(LookupError, match="not here"):
        _wait_for_all(failing)
    assert _wait_for_all([rpc.rpc_async("w1", add, (1,))]) == [2]
