"""Native parts of a worker: engine, client and server."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch

from telegrad import _core
from telegrad.errors import NotInitialized
from telegrad.group.rendezvous import Group
from telegrad.options import Options
from telegrad.serialize.function_names import BY_VALUE
from telegrad.types import WorkerInfo
from telegrad.worker.autograd_hooks import AutogradHooks
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.callables import checked_arguments, rerun_for_torch_error
from telegrad.worker.calls.client import CallForm, Calls
from telegrad.worker.calls.encoded import Request
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.interceptors import active
from telegrad.worker.calls.messages import Messages
from telegrad.worker.closed import AnyEngine
from telegrad.worker.scope import Scope, autocast_is_on, caller_flags, clean_state, current
from telegrad.worker.serving.handlers import Handlers
from telegrad.worker.serving.request_info import RequestInfo

__all__ = ["ENVIRONMENT", "NOT_ENCODABLE", "OtherReply", "is_encrypted", "make_engine", "make_server"]

NOT_ENCODABLE: int = _core.Client.NOT_ENCODABLE  # returned by `Client.send_gradients`
OtherReply: type[_core.OtherReply] = _core.OtherReply

_SECOND = 1_000_000_000


class Environment(NamedTuple):
    """Python objects of the process that the native client and server use."""

    current: ContextVar[Scope | None] = current
    info_type: type = WorkerInfo
    form_type: type = CallForm
    request_type: type = Request
    future_type: type = CallFuture
    by_value: object = BY_VALUE
    interceptors: object = active
    is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
    is_autocast_enabled: Callable[[], bool] = autocast_is_on
    running_loop: Callable[[], object] = asyncio._get_running_loop
    caller_flags: Callable[[], int] = caller_flags
    checked_arguments: Callable[[object, object], object] = checked_arguments
    check_blocking: Callable[[], None] = check_blocking
    not_initialized: type = NotInitialized
    # of the native server only
    request_info: type = RequestInfo
    clean_state: Callable[[], None] = clean_state
    rerun_for_torch_error: Callable[..., object] = rerun_for_torch_error


ENVIRONMENT = Environment()


def is_encrypted(group: Group, options: Options) -> bool:
    """Return whether the TCP connections of a worker are encrypted."""
    return options.encryption == "auto" and bool(options.tls_cert or not group.shared_secret)


def make_engine(
    info: WorkerInfo, incarnation: int, group: Group, options: Options, faults: _core.Faults | None
) -> _core.Engine:
    """Create an engine without listeners and without peers.

    Raises:
        RuntimeError: A certificate cannot be used, or the group has a secret and the core is built without OpenSSL.
    """
    return _core.Engine(
        id=info.id,
        name=info.name,
        incarnation=incarnation,
        group=group.token,
        secret=group.secret,
        spin=options.spin_us * 1000,
        handlers=options.num_worker_threads,
        window=options.request_window_bytes,
        pool_cache=options.pool_cache_bytes,
        handshake_timeout=int(options.handshake_timeout * _SECOND),
        connect_timeout=int(options.connect_timeout * _SECOND),
        heartbeat=int(options.heartbeat * _SECOND),
        local_heartbeat=int(options.local_heartbeat * _SECOND),
        max_body=options.max_header_bytes,
        max_message=options.max_message_bytes,
        shared_memory=options.shared_memory_bytes,
        lanes=options.tcp_lanes,
        max_call_depth=options.max_call_depth,
        max_in_flight=options.max_in_flight,
        max_in_flight_bytes=options.max_in_flight_bytes,
        send_queue=options.send_queue_bytes,
        max_waiting=options.max_waiting_messages,
        arena_budget=options.arena_budget_bytes,
        max_peers=options.max_peers,
        max_unauthenticated=options.max_unauthenticated,
        resume=options.resume,
        check_uid=True,
        secret_given=not group.shared_secret,
        encrypted=is_encrypted(group, options),
        certificate=options.tls_cert or "",
        private_key=options.tls_key or "",
        authority=options.tls_ca or "",
        faults=faults,
    )


class ServedWorker(Protocol):
    """`telegrad.worker.worker.Worker`, as this module uses it."""

    engine: AnyEngine
    messages: Messages
    autograd: AutogradHooks[Any]
    calls: Calls
    handlers: Handlers


def make_server(worker: ServedWorker, callback_scope: Scope) -> _core.Server:
    """Create the server of a worker, which already has its calls and handlers."""
    codec = worker.messages.serializer.codec
    return _core.Server(
        worker.engine,
        codec,
        worker.autograd,
        worker.calls,
        worker.handlers,
        ENVIRONMENT,
        worker,
        Scope,
        callback_scope,
    )
