"""Worker: one member of one group, and everything that it owns.

The worker connects native events, the protocols and torch. Each part has its own file; this file composes them. There
are no globals: several workers may live in one process.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from telegrad import _core
from telegrad.errors import NotInitialized, RRefError
from telegrad.group import addresses
from telegrad.group.process_identity import own_process
from telegrad.group.rendezvous import Group, Member
from telegrad.group.store_waits import Store
from telegrad.options import Options
from telegrad.protocols.membership import ordinal_of
from telegrad.protocols.rref import Ticket
from telegrad.serialize.unpickling import PickleGate
from telegrad.types import WorkerInfo
from telegrad.wire import Tag
from telegrad.wire.ints import TAG_CONNECT, TAG_REFERENCES
from telegrad.worker import lifecycle_log, process_hooks
from telegrad.worker.autograd_hooks import AutogradHooks, WorkerPlugins
from telegrad.worker.calls.client import Calls
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.messages import Messages
from telegrad.worker.calls.pending_work import OpenWork
from telegrad.worker.calls.retrying import Retries
from telegrad.worker.closed import AnyEngine, AnyServer, ClosedEngine
from telegrad.worker.diagnostics.running import RunningHandlers
from telegrad.worker.diagnostics.size_warning import SizeWarning
from telegrad.worker.diagnostics.watchdog import Watchdog
from telegrad.worker.fault_rules import WorkerFaults
from telegrad.worker.membership.changes import MemberChanges
from telegrad.worker.membership.members import Members
from telegrad.worker.membership.service import MembershipService
from telegrad.worker.membership.shutdown_barrier import GracefulShutdown
from telegrad.worker.membership.shutdown_lock import ShutdownLock
from telegrad.worker.native import ENVIRONMENT, is_encrypted, make_engine, make_server
from telegrad.worker.refs.references import References
from telegrad.worker.scope import Scope, current
from telegrad.worker.serving.dispatch import Dispatcher
from telegrad.worker.serving.event_loop import EventLoop
from telegrad.worker.serving.exposure import ALLOW_ALL, AllowList
from telegrad.worker.serving.handlers import Handlers
from telegrad.worker.serving.once import RememberedRuns, run_once
from telegrad.worker.serving.thread_pool import CANCEL, COMPLETION, EVENT, ONEWAY, ThreadPool
from telegrad.worker.timers import Timers
from telegrad.worker.unread_failures import log_unread

__all__ = ["Worker"]

logger: logging.Logger = logging.getLogger("telegrad")

_SECOND = 1_000_000_000
_RELEASE_DELAY = 5_000_000  # ns that releases of references wait to be batched
_FLUSH_TIME = 2.0  # s for buffered bytes to be sent when closing
_IDS_PER_INCARNATION = 1 << 32  # ids of references and contexts
_JOIN_TIMEOUT = 5.0  # s for running handlers to end when closing

_numbers = itertools.count()
_outer: ContextVar[tuple[Scope | None, ...]] = ContextVar("telegrad_outer_scopes", default=())


class Worker(MemberChanges):
    """Member of a group.

    `telegrad.rpc.init_rpc` and `telegrad.rpc.Worker` create it and wait for the other members.

    Args:
        info: Name and id.
        group: Token and secret of the group.
        options: See `telegrad.options`.
        store_at: Host of the store, which decides the address to listen on.
        incarnation: Distinguishes this process from earlier ones with the name; see `telegrad.protocols.membership`.
        plugins: Objects of the higher layers.
    """

    def __init__(
        self, info: WorkerInfo, group: Group, options: Options, store_at: str, incarnation: int, plugins: WorkerPlugins
    ) -> None:
        self.info = info
        self.group = group
        self.options = options
        self.incarnation: int = incarnation
        first_id = (ordinal_of(incarnation) - 1) * _IDS_PER_INCARNATION
        self.static = True
        self.store: Store | None = None
        self.membership: MembershipService | None = None  # set once the worker has joined
        self.closed: bool = False
        self.joined: bool = False
        self.fenced: str = ""  # why the group has gone on without this worker
        self.ready: threading.Event = threading.Event()  # set once all members are known: requests may run
        self.attachments: dict[str, Any] = {}  # objects of the higher layers for this worker
        self.passive_work: list[Callable[[], set[object]]] = []  # calls and requests that a shutdown ignores
        self.waiting_readers: list[Callable[[], int]] = []  # counts of threads and tasks that a shutdown waits for
        self.on_close: list[Callable[[], object]] = []  # called once the engine has stopped
        self.on_fork: list[Callable[[], object]] = []  # called in a forked child
        self.members: Members = Members(info, self._read_store, self.incarnation)
        self._close_lock = threading.Lock()
        self._closing_thread: int | None = None  # the thread in `close`
        self._close_done = threading.Event()  # set once closed and all waits for threads have ended
        self.shutdown_lock: ShutdownLock = ShutdownLock(self.close)

        listen, host = addresses.listen_addresses(options, store_at, info.name, is_encrypted(group, options))
        if group.shared_secret and not addresses.is_loopback(host):
            logger.warning(
                "worker %s listens on %s, and its group has no given secret: any process at the store may call"
                " functions of this worker. Set TELEGRAD_SECRET (or the option secret) on all workers.",
                info.name,
                host,
            )
        self.faults: WorkerFaults | None = (
            WorkerFaults(info.name, options.transports, options.faults) if options.faults else None
        )
        faults = self.faults.native if self.faults else None
        self.engine: AnyEngine = make_engine(info, self.incarnation, group, options, faults)
        bound = [self.engine.listen(address) for address in listen]
        self.host: str = addresses.host_key()
        self.member: Member = Member(
            info.id,
            info.name,
            self.incarnation,
            addresses.advertised(bound, options, store_at),
            self.host,
            process=own_process(),
        )
        to_self = self.engine.listen(f"inproc:{os.getpid()}-{next(_numbers)}-{info.name}")
        self.engine.set_peer(info.id, info.name, self.incarnation, [to_self])

        self.references: References = References(
            info.id,
            first_id,
            self.members.name_of,
            self.members.lost_incarnation,
            self._send_reference_message,
            lambda: self.engine.request_callback(_RELEASE_DELAY),
            lambda rref, owner, fork: plugins.rref_type.of(self, rref, owner, fork),
            self.is_open,
            self._set_epoch,
            self._submit,
            SizeWarning(info.name, "remote references", "warn_references", options.warn_references),
        )
        self.autograd: AutogradHooks[Any] = plugins.make_autograd(self, first_id)
        self.messages: Messages = Messages(
            plugins.rref_type,
            self._share,
            self.references.unshare,
            self.references.epoch_of,
            self.references.receive,
            self.references.new_id,
            self.autograd,
            self.members.name_of,
            PickleGate(options.allow_pickle),
            options.max_objects,
        )
        self.calls: Calls = Calls(
            self.engine,
            self.messages,
            self.members.resolve,
            self.members.name_of,
            self.members.lost_incarnation,
            info.id,
            self.members.by_key,
            options.rpc_timeout,
            ENVIRONMENT,
        )
        self.timers: Timers = Timers(f"telegrad-{info.name}-timers")
        self.loop: EventLoop = EventLoop(info.name)
        self.handlers: Handlers = Handlers(
            self,
            info,
            self.engine,
            self.messages,
            self.references,
            self.loop,
            self._submit,
            options.remote_error_number(),
            ALLOW_ALL if options.expose == "all" else AllowList(info.name),
        )
        self.callback_scope: Scope = Scope(self, 0, 1)
        self.server: AnyServer = make_server(self, self.callback_scope)
        self.handlers.update_recording()
        self.shutdown: GracefulShutdown = GracefulShutdown(self)
        self.dispatcher: Dispatcher = Dispatcher(self)
        self.pool: ThreadPool = ThreadPool(
            self.engine,
            self.server,
            info.name,
            {
                ONEWAY: self.dispatcher.on_message,
                COMPLETION: self.dispatcher.on_completion,
                EVENT: self.dispatcher.on_event,
                CANCEL: self.handlers.cancel,
            },
        )
        self.running: RunningHandlers = RunningHandlers(
            self.pool, self.loop, self.handlers.deferred_requests, self.find_request, self.members.name_of
        )
        self.calls.open_work = OpenWork(self.timers.call_later, self.pool.submit)
        self.retries: Retries = Retries(run_once)
        self.remembered_runs: RememberedRuns = RememberedRuns(self.timers.call_later, options.retry_results_bytes)
        self.watchdog: Watchdog = Watchdog(
            info.name, options.stuck_handler_timeout, self.running, self.timers.call_later
        )
        self.pool.on_growth = self.watchdog.start  # the first thread of the pool alone runs no handler for long
        self.pool.start()
        process_hooks.register(self)

    def __repr__(self) -> str:
        return f"Worker(name={self.info.name!r}, id={self.info.id}, group of {len(self.members.infos())})"

    # ---- calls

    def rpc_sync(
        self, to: object, func: object, args: object = None, kwargs: object = None, timeout: float = -1.0
    ) -> Any:
        """See `telegrad.rpc.rpc_sync`."""
        calls = self.calls
        within = calls.default_timeout if timeout == -1.0 else calls.timeout(timeout)
        return calls.client.call(to, func, args, kwargs, within)

    def rpc_async(
        self, to: object, func: object, args: object = None, kwargs: object = None, timeout: float = -1.0
    ) -> CallFuture[Any]:
        """See `telegrad.rpc.rpc_async`."""
        calls = self.calls
        within = calls.default_timeout if timeout == -1.0 else calls.timeout(timeout)
        future: CallFuture[Any] = calls.client.start(to, func, args, kwargs, within)
        return future

    def start_internal(self, to: int, func: object, args: Sequence[object], timeout: float) -> CallFuture[Any]:
        """Start an internal call, which a shutdown does not wait for."""
        calls = self.calls
        future: CallFuture[Any] = calls.client.start(
            to, func, tuple(args), {}, calls.timeout(timeout), None, False, True
        )
        return future

    def __enter__(self) -> "Worker":
        """Make this the current worker of the context, for calls of `telegrad.rpc`."""
        outer = current.get()
        _outer.set((*_outer.get(), outer))
        # Within a handler, the deadline of its request still applies to calls through any worker.
        if outer is None:
            current.set(Scope(self, 0, 0))
        elif outer.worker is self:
            current.set(outer)
        else:  # an autograd context and a connection belong to one worker
            current.set(outer._replace(worker=self, autograd=None, connection=0, call=0))
        return self

    def __exit__(self, *_: object) -> None:
        *others, outer = _outer.get()
        _outer.set(tuple(others))
        current.set(outer)

    # ---- sessions

    def is_open(self, connection: int) -> bool:
        """Return whether the session of a connection has not ended."""
        return self.engine.is_open(connection)

    def find_request(self, connection: int, call: int) -> _core.RequestSnapshot | None:
        """Return a request that has begun and has no reply; None if there is none."""
        return self.engine.find_request(connection, call)

    def _set_epoch(self, peer: int, epoch: int) -> None:
        self.engine.set_epoch(peer, epoch)

    # ---- references

    def _share(self, handle: Any, peer: int, epoch: int) -> Ticket:
        holder: Worker = handle.worker
        if holder is not self:
            holder.references.check(handle.id, handle.owner_id)  # a closed worker has released the reference
            raise RRefError(
                f"{handle!r} belongs to worker {holder.info.name}, and cannot be sent in calls of worker"
                f" {self.info.name}. Call with worker {holder.info.name}, or send the value instead."
            )
        handle._mark_used()
        return self.references.share(handle.id, handle.owner_id, peer, epoch)

    def _send_reference_message(self, peer: int, plain: object, kind: str, epoch: int) -> None:
        message = self.messages.encode(peer, plain)

        def send() -> None:
            self.engine.send(peer, TAG_REFERENCES, message.flags, message.body, message.segments, epoch)

        self.calls.send_message(kind, peer, send)

    def _submit(self, job: Callable[..., None], *arguments: object) -> None:
        self.pool.submit(job, *arguments)

    # ---- closing

    def ensure_connected(self, peers: Iterable[int]) -> None:
        """Connect to these workers, so that their loss is noticed."""
        for peer in peers:
            self.engine.send(peer, TAG_CONNECT, 0, b"", None)

    def send_oneway(self, peer: int, tag: Tag, value: object) -> None:
        """Send an internal one-way message."""
        message = self.messages.encode(peer, value)
        self.engine.send(peer, int(tag), message.flags, message.body, message.segments)

    def close(self, interrupted: bool = False, limit: float = 0) -> None:
        """Leave the group without waiting for other workers.

        Pending calls fail; running handlers get a few seconds to end. Any thread may call it again, also a handler. A
        second call waits for the first, unless the first waits for its thread.

        Args:
            interrupted: Ctrl+C ended the program: log no warnings.
            limit: Limit in seconds of the wait for the store to let the worker go; 0 for the default.
        """
        with self._close_lock:
            first, self.closed = not self.closed, True
            if first:
                self._closing_thread = threading.get_ident()
        if first:
            try:
                self._close(interrupted, limit)
            finally:
                self._close_done.set()
        elif not self._must_not_wait():
            self._close_done.wait()

    def _must_not_wait(self) -> bool:
        """Return whether the closing thread is, or waits for, the calling thread."""
        return (
            self._closing_thread == threading.get_ident()
            or self.owns_current_thread()
            or self.timers.owns_current_thread()
        )

    def owns_current_thread(self) -> bool:
        """Return whether the calling thread runs handlers or callbacks of this worker.

        Takes no lock.
        """
        return self.pool.owns_current_thread() or self.loop.owns_current_thread()

    def _close(self, interrupted: bool, limit: float) -> None:
        self.ready.set()
        self.shutdown.stop()
        self.references.closed = True
        self.engine.stop(int(_FLUSH_TIME * _SECOND))
        try:
            self.retries.close()
            self.calls.open_work.close()
            self.remembered_runs.close()
            if self.membership is not None:
                self.membership.stop(limit=limit)
            for close in self.on_close:
                close()
            until = time.monotonic() + _JOIN_TIMEOUT
            ends = (self.timers.stop, self.loop.stop, self.pool.join)
            if False in [end(max(0.0, until - time.monotonic())) for end in ends]:
                level = logging.INFO if interrupted else logging.WARNING
                logger.log(level, "worker %s shut down while a handler still ran: its thread continues", self.info.name)
        finally:
            self.calls.interceptors.clear()
            self.calls.own_interceptors.clear()
            self.calls.use_pickler(None)
            self.autograd.close()
            self.references.close()
            assert isinstance(self.engine, _core.Engine)
            self._replace_engine(ClosedEngine(self.engine, self.fenced))
            self.store = self.membership = None  # the store's host may end
            self.on_close.clear()
            _core.release()
            process_hooks.unregister(self)
            log_unread()
            if self.joined:
                lifecycle_log.left(self)

    def fence(self, why: str) -> None:
        """Close this worker, because the group has gone on without it. Does not wait.

        Args:
            why: Why the group has done so.
        """
        if self.closed or self.fenced:
            return
        self.fenced = self.calls.fenced = (
            f"worker {self.info.name} is out of its group: {why}. Start it again to join as a new process."
        )
        logger.error("%s", self.fenced)
        threading.Thread(target=self.close, name=f"telegrad-{self.info.name}-fence", daemon=True).start()

    def detach_after_fork(self) -> AnyEngine:
        """Mark the worker of the parent as closed in a forked child.

        Returns:
            The engine of the parent, which must neither be used nor freed.
        """
        self.closed = True
        self._close_done = threading.Event()  # a thread of the parent may hold the lock of the old event
        self._close_done.set()
        self.references.detach_after_fork()
        self.autograd.detach_after_fork()
        engine = self.engine
        self._replace_engine(ClosedEngine(None))
        for detach in self.on_fork:
            detach()
        return engine

    def _replace_engine(self, closed: ClosedEngine) -> None:
        """Release the engine, which ends with the last thread inside one of its methods."""
        self.engine = self.server = self.calls.engine = self.calls.client = self.handlers.engine = closed
        self.pool.replace_engine(closed)

    @property
    def busy(self) -> bool:
        """Return whether a call or a backward pass of this worker is pending."""
        return bool(self.engine.stats()["pending_calls"]) or self.autograd.busy

    def require_open(self) -> None:
        """Raise NotInitialized after `close`."""
        if isinstance(self.engine, ClosedEngine):
            self.engine.raise_closed()
        if self.closed:
            raise NotInitialized.closed(self.fenced)
