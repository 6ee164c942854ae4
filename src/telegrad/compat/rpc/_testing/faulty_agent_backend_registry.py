"""Torch's module that registers the backend ``FAULTY_TENSORPIPE``."""

from typing import Any

from telegrad.compat.rpc._testing import FaultyTensorPipeRpcBackendOptions
from telegrad.rpc import api
from telegrad.rpc.backend_registry import backend_registered, register_backend


def _faulty_tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float, init_method: str, **others: Any
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **others)


def _faulty_tensorpipe_init_backend_handler(
    store: object, name: str, rank: int, world_size: int | None, rpc_backend_options: object
) -> object:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}")
    agent = api._start_agent(store, name, rank, world_size, rpc_backend_options)
    agent.worker.calls.own_interceptors.add(rpc_backend_options.faults())
    return agent


if not backend_registered("FAULTY_TENSORPIPE"):
    register_backend(
        "FAULTY_TENSORPIPE",
        _faulty_tensorpipe_construct_rpc_backend_options_handler,
        _faulty_tensorpipe_init_backend_handler,
    )
