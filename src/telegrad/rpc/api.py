"""Functions of `telegrad.rpc` apart from calls: workers, gathering, shutdown.

Names with an underscore are torch's private ones. Programs and torch's own tests replace them in this module, so they
are defined here and looked up here at every use.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from telegrad.errors import NotInitialized, RRefError, ShutdownTimeout, TelegradError
from telegrad.rpc.agent import Agent
from telegrad.rpc.calls import (
    _thread_local_var,  # noqa: F401  # as in torch's module
    _wait_all,  # noqa: F401  # as in torch's module
    call,
    remote,
    rpc_async,
    rpc_sync,
)
from telegrad.rpc.collectives import AllGatherStates, gather
from telegrad.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from telegrad.rpc.gathering_failures import LeftAfterGathering, LostWhileGathering
from telegrad.rpc.gathering_handlers import receive_offer, receive_values
from telegrad.rpc.internal import (
    TORCH_PICKLER,
    PythonUDF,  # noqa: F401  # as in torch's module
    TorchPickler,
    _internal_rpc_pickler,
)
from telegrad.rref import RRef
from telegrad.streams.service import Streams
from telegrad.timeouts import SharedDeadline, nanoseconds
from telegrad.types import WorkerInfo
from telegrad.worker import Worker
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.interceptors import PICKLER, internal, switch
from telegrad.worker.calls.messages import Messages
from telegrad.worker.default_worker import current_worker, open_worker, set_default_worker
from telegrad.worker.membership.joining import leave_dynamic
from telegrad.worker.scope import current

__all__ = [
    "AllGatherStates",
    "RRef",
    "call",
    "get_rpc_timeout",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger: logging.Logger = logging.getLogger("telegrad")

P = ParamSpec("P")
R = TypeVar("R")

PyRRef = RRef
_worker = open_worker
_ignore_rref_leak = True
_default_pickler: object = _internal_rpc_pickler
_agent: Any = None
_ALL_WORKER_NAMES: set[str] = set()

_NOT_THE_DEFAULT = (
    "rpc.shutdown() ends the worker of init_rpc, which this process has not called. Call the method shutdown() of the"
    " telegrad.rpc.Worker {}."
)
_LEAVE_RELEASE_TIMEOUT = 10.0  # s to release references while leaving a dynamic group
_RELEASE_TIMEOUT = timedelta(seconds=100)

# ---- the worker


def _get_current_rpc_agent() -> Any:
    """Return the agent of the current worker, by default of the process's worker."""
    worker = current_worker()
    if worker is not None and (_agent is None or getattr(_agent, "worker", None) is not worker):
        return Agent(worker)
    if _agent is None:
        raise NotInitialized(NotInitialized.AGENT)
    return _agent


def _is_current_rpc_agent_set() -> bool:
    return _agent is not None


def _set_and_start_rpc_agent(agent: object) -> None:
    global _agent
    _agent = agent
    set_default_worker(agent.worker if isinstance(agent, Agent) else None)


def _reset_current_rpc_agent() -> None:
    global _agent
    _agent = None
    set_default_worker(None)


def _init_rpc_states(agent: Agent) -> None:
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _start_agent(store: Any, name: str, rank: int, world_size: int | None, options: object) -> Agent:
    from telegrad.rpc.start import start_agent

    return start_agent(store, name, rank, world_size, options)


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it raises `NotInitialized` outside of a group."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if current_worker() is None and not _is_current_rpc_agent_set():
            raise NotInitialized
        return func(*args, **kwargs)

    return wrapper


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Look up a worker's name and id.

    Args:
        worker_name: the worker: its name, id or WorkerInfo; by default the current one.

    Returns:
        The WorkerInfo, which every call takes as ``to``.

    Raises:
        RuntimeError: this process has not joined a group (`NotInitialized`), or the group has no such worker
            (`UnknownWorker`; the text lists the workers of the group).
        TypeError: the argument is none of these. The error is a ValueError as well, as that of calls.

    Example::

        me = rpc.get_worker_info()
        server = rpc.get_worker_info("worker1")
        print(me.id, server.id)  # 0 1
    """
    return _worker().members.look_up(worker_name)


def get_rpc_timeout() -> float:
    """Return the default timeout of this worker's calls.

    Returns:
        Seconds; 0 is no limit. The value is ``rpc_timeout`` of the options with which the worker joined.

    Raises:
        RuntimeError: this process has not joined a group (`NotInitialized`).

    Example::

        rpc.rpc_sync("worker1", torch.seed, timeout=10 * rpc.get_rpc_timeout())
    """
    worker = current_worker()
    if worker is None:
        raise NotInitialized(NotInitialized.AGENT)
    return worker.calls.default_timeout / 1e9


def _set_rpc_timeout(seconds: float | timedelta) -> None:
    """Set the default timeout of the calls that follow."""
    value = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
    _worker().calls.default_timeout = nanoseconds(value)


def _to_worker_info(to: object) -> WorkerInfo:
    return to if isinstance(to, WorkerInfo) else _worker().members.resolve(to)


# ---- calls: see telegrad.rpc.calls


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Encode the calls of all workers with the given pickler.

    Callees decode them with the default pickler, as in torch.
    """
    global _default_pickler
    _default_pickler = rpc_pickler
    switch(PICKLER, TorchPickler(rpc_pickler))
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler
        switch(PICKLER, None)


# ---- the group


def _gather_to_leader(sequence_id: str, worker_name: str, obj: object, worker_names: set[str] | None = None) -> Any:
    return receive_offer(_worker(), sequence_id, worker_name, obj, worker_names)


def _broadcast_to_followers(sequence_ids: dict[str, str], objects_map: dict[str, object]) -> Any:
    return receive_values(_worker(), sequence_ids, objects_map)


internal.update((_gather_to_leader, _broadcast_to_followers))


def _all_gather(
    obj: object, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, object]:
    """Return the objects of all workers by worker name, on every worker.

    Args:
        obj: this worker's object.
        worker_names: the workers that take part; all by default.
        timeout: seconds; 0 is no limit; -1 is the default timeout for the calls and no limit for the wait.

    Raises:
        TypeError: the timeout is not a number.
        ValueError: this worker is not one of those that take part, or the timeout is NaN.
        RuntimeError: some workers did not take part in time, or are lost; the text names them.
    """
    worker = _worker()
    names = set(worker_names) if worker_names else _remaining_names(worker)
    return gather(worker, obj, names, timeout, _gather_to_leader, _broadcast_to_followers)


def _remaining_names(worker: Worker) -> set[str]:
    """Return the names of the workers that take part in operations of the whole group.

    If the group went on without this worker at the beginning of its shutdown, because its connection was lost, the
    others do not wait for it.
    """
    gone = worker.members.gone_at_shutdown
    if worker.info.id in gone:
        return {worker.info.name}
    return {info.name for info in worker.members.infos() if info.id not in gone}


def _barrier(worker_names: set[str]) -> None:
    """Wait until all these workers have called this. Log a failure, as torch does."""
    try:
        _all_gather(None, set(worker_names))
    except LeftAfterGathering:  # all workers have reached the barrier
        logger.debug("Some workers left right after a barrier", exc_info=True)
    except RuntimeError:
        logger.exception("Failed to complete barrier")


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers shut down."""
    try:
        _all_gather(None, timeout=timeout)
    except LostWhileGathering:
        raise
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# ---- the end


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group, and end all threads and connections.

    `init_rpc` may be called again afterwards. References to other workers' values are released, so using one raises.
    Received tensors stay valid.

    Args:
        graceful: wait until all workers of the group have called this and all their work is done. Lost workers are not
            waited for. In a dynamic group, wait only until the calls and requests of this worker are done. With False,
            calls of other workers to this one fail.
        timeout: limit in seconds for all waits together; 0 and -1 are the worker's option ``shutdown_timeout``, which
            is no limit by default.

    Raises:
        TypeError: the timeout is not a number. Nothing is done.
        ValueError: the timeout is NaN, or another negative number. Nothing is done.
        RuntimeError: this process has not joined (`NotInitialized`); or some workers did not shut down, or work
            did not end, in time (`ShutdownTimeout`; the text says which), and the worker has left all the same; or a
            handler has called this with ``graceful``, in which case nothing is done.

    Example::

        rpc.init_rpc("worker0", rank=0, world_size=2)
        try:
            rpc.rpc_sync("worker1", print, args=("hello",))
        finally:
            rpc.shutdown(timeout=60)
    """
    if not _is_current_rpc_agent_set():
        worker = current_worker()
        raise NotInitialized if worker is None else NotInitialized(_NOT_THE_DEFAULT.format(worker.info.name))
    agent = _agent
    if isinstance(agent, Agent):
        _refuse_in_handlers(graceful)
        _shutdown_limit(agent.worker, timeout)
    try:
        if isinstance(agent, Agent):
            shutdown_worker(agent.worker, graceful, timeout)
        else:
            agent.shutdown()
    finally:
        if _agent is agent:  # another thread may have shut this agent down and joined again
            _reset_current_rpc_agent()


def shutdown_worker(worker: Worker, graceful: bool, timeout: float) -> None:
    """Shut down the given worker. A second call waits for the first."""
    _refuse_in_handlers(graceful)
    limit = _shutdown_limit(worker, timeout)
    with worker.shutdown_lock.held(limit) if graceful else contextlib.nullcontext():
        if worker.closed:
            worker.close()
        else:
            _shut_down(worker, graceful, limit)


def _shutdown_limit(worker: Worker, timeout: float) -> float:
    """Return the limit of a shutdown in seconds, 0 for none."""
    if timeout in (DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT):
        return worker.options.shutdown_timeout
    given: object = timeout
    if isinstance(given, (int, float)) and given < 0:
        raise ValueError(
            f"the timeout of shutdown has to be a number of seconds, 0 or more, not {timeout}: 0 and -1 are the option"
            " shutdown_timeout"
        )
    return nanoseconds(timeout) / 1e9


def _refuse_in_handlers(graceful: bool) -> None:
    scope = current.get()
    if graceful and scope is not None and (scope.request or scope.connection):
        raise TelegradError(
            "shutdown() was called in a handler, or in a callback added by one: it would wait for its own caller."
            " Call it where the worker was created, or leave at once with shutdown(graceful=False)."
        )
    if graceful:
        check_blocking("shutdown()", "`await asyncio.to_thread(...)` for it")


def _close_streams(worker: Worker) -> None:
    """Close the streams of a worker whose work has ended: no thread waits for an item."""
    if (streams := Streams.existing(worker)) is not None:
        streams.close()


def _shut_down(worker: Worker, graceful: bool, timeout: float) -> None:
    interrupted, budget = False, SharedDeadline(timeout)
    try:
        if graceful and worker.static:
            # All live workers are here and agree on the lost ones. A gathering alone cannot establish that.
            worker.shutdown.run(timeout, last=False)
            _close_streams(worker)
            try:
                _wait_all_workers(min(timeout, budget.left()))
            except LostWhileGathering:
                logger.info("worker %s continues its shutdown without the lost workers", worker.info.name)
            _delete_all_user_and_unforked_owner_rrefs(*([timedelta(seconds=left)] if (left := budget.left()) else []))
            worker.shutdown.run(budget.left(), last=True)
        elif graceful:
            if not leave_dynamic(worker, budget, lambda: _close_streams(worker)):
                raise ShutdownTimeout(timeout)
            worker.references.release_all(min(budget.left() or _LEAVE_RELEASE_TIMEOUT, _LEAVE_RELEASE_TIMEOUT))
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        try:
            _destroy_rref_context(_ignore_rref_leak, worker)
        finally:
            worker.close(interrupted, budget.left())


def _delete_all_user_and_unforked_owner_rrefs(timeout: timedelta = _RELEASE_TIMEOUT) -> None:
    """Release all references to other workers' values.

    Also wait until the other workers have released theirs to this worker's values. Log a warning after `timeout`.
    """
    worker = _worker()
    if not worker.references.release_all(timeout.total_seconds()):
        logger.warning("Timed out waiting for pending UserRRefs to be confirmed by owner and parent.")


def _destroy_rref_context(ignore_leak: bool, worker: Worker | None = None) -> None:
    leaks = (worker or _worker()).references.leaks()
    if leaks and not ignore_leak:
        raise RRefError(
            "Leaking RRefs: when this worker shut down, others still referred to its values:"
            + "".join(f"\nLeaking RRef {leak.rref}, held by workers {sorted(leak.tokens)}" for leak in leaks)
        )


def _cleanup_python_rpc_handler() -> None:
    """Do nothing; kept for programs that call it."""


def _rref_context_get_debug_info() -> dict[str, str]:
    references = _worker().references
    stats = references.stats()
    return {
        "num_owner_rrefs": str(len(references.leaks())),
        "num_pending_futures": str(references.pending_creations),
        "num_pending_users": str(stats.pending_users),
        "num_forks": str(stats.forks),
    }


def enable_gil_profiling(flag: bool) -> None:
    """Add the GIL's wait time, which is always 0, to the agent's debug info."""
    from telegrad.rpc import agent

    agent.gil_profiling[0] = flag


def _rref_typeof_on_owner(rref: RRef[object], blocking: bool = True) -> object:
    return rref._get_type(blocking=blocking)


def _rref_typeof_on_user(rref: RRef[object], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> object:
    return rref._get_type(timeout, blocking)


def method_factory(method_name: str, docstring: str | None) -> Callable[..., object]:
    """Return a method of RRef; kept for programs that import torch's function."""

    def method(self: RRef[object], *args: object, **kwargs: object) -> object:
        return getattr(super(RRef, self), method_name)(*args, **kwargs)

    method.__doc__ = docstring
    return method


def new_method(*_: object) -> None:
    raise TelegradError("new_method only exists for compatibility with torch's module, and does nothing.")


os.register_at_fork(after_in_child=_reset_current_rpc_agent)  # the worker stays with the parent
Messages.known_picklers[TORCH_PICKLER] = TorchPickler(_internal_rpc_pickler)
