"""Remote calls and remote references: the API of ``torch.distributed.rpc``.

A program written for that package runs with ``import telegrad.rpc as rpc`` instead of its import.
"""

import telegrad.observe  # noqa: F401  # shows calls in profiles
from telegrad.rpc import api, backend_registry, constants, functions, options
from telegrad.rpc.api import (
    AllGatherStates,
    RRef,
    call,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from telegrad.rpc.cancellation import cancelled
from telegrad.rpc.debug import debug_info
from telegrad.rpc.exposing import expose
from telegrad.rpc.groups import all_gather, barrier, broadcast, on_join, on_leave, on_lost, wait_for_worker
from telegrad.rpc.intercept import Registration, intercept, register_type, use_pickler
from telegrad.rpc.map import map as map  # public, but `import *` must not hide Python's own
from telegrad.rpc.memory import empty
from telegrad.rpc.multicast import multicast
from telegrad.rpc.options import Options, RpcBackendOptions, TensorPipeRpcBackendOptions
from telegrad.rpc.services import get_service, register_service
from telegrad.rpc.start import init_rpc, is_available
from telegrad.rpc.streams import stream
from telegrad.rpc.torch_compile import skip_telegrad
from telegrad.rpc.worker_object import Worker
from telegrad.serialize.program_pickler import Pickler
from telegrad.streams.stream import Stream
from telegrad.types import WorkerInfo
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.interceptors import InterceptedCall, Interceptor, Proceed
from telegrad.worker.calls.retry_policy import Retry
from telegrad.worker.calls.wait_all import wait_all
from telegrad.worker.diagnostics.debug_info import DebugInfo
from telegrad.worker.membership.events import Subscription

__all__ = [
    "AllGatherStates",
    "BackendType",
    "CallFuture",
    "DebugInfo",
    "InterceptedCall",
    "Interceptor",
    "Options",
    "Pickler",
    "Proceed",
    "RRef",
    "Registration",
    "Retry",
    "RpcBackendOptions",
    "Stream",
    "Subscription",
    "TensorPipeRpcBackendOptions",
    "Worker",
    "WorkerInfo",
    "all_gather",
    "api",
    "backend_registry",
    "barrier",
    "broadcast",
    "call",
    "cancelled",
    "constants",
    "debug_info",
    "empty",
    "expose",
    "functions",
    "get_rpc_timeout",
    "get_service",
    "get_worker_info",
    "init_rpc",
    "intercept",
    "is_available",
    "multicast",
    "on_join",
    "on_leave",
    "on_lost",
    "options",
    "register_service",
    "register_type",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "stream",
    "use_pickler",
    "wait_all",
    "wait_for_worker",
]

skip_telegrad()


def __getattr__(name: str) -> object:
    if name == "BackendType":  # replaced when a backend is registered
        return backend_registry.BackendType
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
