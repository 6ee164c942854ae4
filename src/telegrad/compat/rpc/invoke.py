"""Functions below torch's `rpc_sync`, `rpc_async` and `remote`.

They are for programs that call them. In torch each is a function of the C++ core for one kind of callable: an operator
by name, a pickled Python call, a scripted function by name. Here they are ordinary calls, which profiles and autograd
contexts record as well.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad import observe
from telegrad.rpc import api, functions, internal
from telegrad.rpc.calls import NOT_CALLABLE
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.rref import RRef
from telegrad.types import WorkerInfo
from telegrad.worker.calls.future import CallFuture

__all__ = [
    "_invoke_remote_builtin",
    "_invoke_remote_python_udf",
    "_invoke_remote_torchscript",
    "_invoke_rpc",
    "_invoke_rpc_builtin",
    "_invoke_rpc_python_udf",
    "_invoke_rpc_torchscript",
]


def _invoke_rpc(
    to: str | int | WorkerInfo,
    func: Callable[..., object],
    rpc_type: internal.RPCExecMode,
    args: object = None,
    kwargs: object = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> CallFuture[Any]:
    """Call as `rpc_async` does, but outside of `_wait_all`; profile as `rpc_type`."""
    if not callable(func):
        raise TypeError(NOT_CALLABLE)
    worker = api._worker()
    if rpc_type is not internal.RPCExecMode.ASYNC and torch._C._autograd._profiler_enabled():
        name = getattr(func, "__qualname__", type(func).__qualname__)
        observe.name_next_call(
            observe.call_key(rpc_type.value, name, worker.info.name, worker.members.resolve(to).name)
        )
    return worker.rpc_async(to, func, args, kwargs, rpc_timeout)


def _invoke_rpc_builtin(
    dst: WorkerInfo, opName: str, rpcTimeoutSeconds: float, /, *args: object, **kwargs: object
) -> CallFuture[Any]:
    """Call an operator of torch by its name, such as ``aten::add``."""
    _operator(opName)
    return api._worker().rpc_async(dst, run_operator, (opName, args, kwargs), None, rpcTimeoutSeconds)


def _invoke_remote_builtin(
    dst: WorkerInfo, opName: str, rpcTimeoutSeconds: float, /, *args: object, **kwargs: object
) -> RRef[object]:
    """Call as `_invoke_rpc_builtin` does; the callee keeps the result."""
    _operator(opName)
    return api.remote(dst, run_operator, (opName, args, kwargs), None, rpcTimeoutSeconds)


def _invoke_rpc_python_udf(
    dst: WorkerInfo,
    pickledPythonUDF: bytes,
    tensors: Sequence[torch.Tensor],
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
) -> CallFuture[Any]:
    """Run a call pickled by ``internal.serialize(PythonUDF(func, args, kwargs))``.

    The call cannot contain references: they can only be pickled within a message.
    """
    run = _RUN_PICKLED[isAsyncExecution]
    return api._worker().rpc_async(dst, run, (pickledPythonUDF, list(tensors)), None, rpcTimeoutSeconds)


def _invoke_remote_python_udf(
    dst: WorkerInfo,
    pickledPythonUDF: bytes,
    tensors: Sequence[torch.Tensor],
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
) -> RRef[object]:
    """Call as `_invoke_rpc_python_udf` does; the callee keeps the result."""
    run = _RUN_PICKLED[isAsyncExecution]
    return api.remote(dst, run, (pickledPythonUDF, list(tensors)), None, rpcTimeoutSeconds)


def _invoke_rpc_torchscript(
    dstWorkerName: str,
    qualifiedNameStr: str,
    argsTuple: tuple[object, ...],
    kwargsDict: dict[str, object],
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
) -> CallFuture[Any]:
    """Call a scripted function by its qualified name.

    As in torch, this worker must have the function too.

    Raises:
        RuntimeError: this worker has no function of that name.
    """
    _scripted(qualifiedNameStr)
    arguments = (qualifiedNameStr, argsTuple, kwargsDict)
    return api._worker().rpc_async(dstWorkerName, _RUN_SCRIPTED[isAsyncExecution], arguments, None, rpcTimeoutSeconds)


def _invoke_remote_torchscript(
    dstWorkerName: str,
    qualifiedNameStr: str,
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
    /,
    *args: object,
    **kwargs: object,
) -> RRef[object]:
    """Call as `_invoke_rpc_torchscript` does; the callee keeps the result."""
    _scripted(qualifiedNameStr)
    arguments = (qualifiedNameStr, args, kwargs)
    return api.remote(dstWorkerName, _RUN_SCRIPTED[isAsyncExecution], arguments, None, rpcTimeoutSeconds)


# ---- functions that run on the callee


def run_operator(name: str, args: Sequence[object], kwargs: dict[str, object]) -> object:
    """Run an operator of torch, which an allow-list has as ``"torch.ops:aten.add"``."""
    _require_listed("torch.ops", name.replace("::", "."))
    return _operator(name)(*args, **kwargs)


def run_pickled(pickled: bytes, tensors: list[torch.Tensor]) -> object:
    """Run a call that the default pickler has pickled."""
    call = internal.deserialize(pickled, tensors)
    if isinstance(call, AttributeError):
        raise call
    return call.func(*call.args, **call.kwargs)


@functions.async_execution
def run_pickled_async(pickled: bytes, tensors: list[torch.Tensor]) -> object:
    """Run a pickled call of a function that returns a future."""
    return run_pickled(pickled, tensors)


def run_scripted(name: str, args: Sequence[object], kwargs: dict[str, object]) -> object:
    """Run a scripted function, which an allow-list has under its name in Python."""
    _require_listed(*name.removeprefix("__torch__.").rpartition(".")[::2])
    return _scripted(name)(*args, **kwargs)


@functions.async_execution
def run_scripted_async(name: str, args: Sequence[object], kwargs: dict[str, object]) -> object:
    """Run a scripted function that returns a future."""
    return run_scripted(name, args, kwargs)


_RUN_PICKLED = (run_pickled, run_pickled_async)
_RUN_SCRIPTED = (run_scripted, run_scripted_async)


def _require_listed(module: str, path: str) -> None:
    """Raise NotExposed if this worker has an allow-list without a name."""
    exposure = api._worker().handlers.exposure
    if exposure.admit is not None:
        exposure.require_listed(module, path)


def _operator(name: str) -> Callable[..., object]:
    path = name.replace("::", ".")
    try:
        found: Callable[..., Any] = operator.attrgetter(path)(torch.ops)
    except (AttributeError, RuntimeError) as e:
        raise RuntimeError(f"there is no operator {name!r} in torch.ops; a name is, for example, 'aten::add'.") from e
    return found


def _scripted(name: str) -> Any:
    function = torch.jit._state._python_cu.find_function(name)
    if function is None:
        raise RuntimeError(
            f"there is no scripted function {name!r} on worker {api._worker().info.name}. Import the module that"
            " defines it, on the caller and on the callee."
        )
    return function
