"""A worker: one member of one group, and everything it owns.

This is where native events, the protocols and torch meet; each part has its own file, and this one ties them together.
It is longer than our files are: its methods are what the parts and the public API call, and most only pass a call on.
Nothing here is global: several workers may live in one process.
"""

import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from telegrad import _core
from telegrad.errors import NotInitialized, RRefError, ShutdownTimeout, UnknownWorker
from telegrad.group import addresses, rendezvous
from telegrad.group.rendezvous import Group, Member
from telegrad.options import Options
from telegrad.protocols.rref import Ticket
from telegrad.protocols.shutdown import GaveUp
from telegrad.timeouts import SharedDeadline
from telegrad.types import WorkerInfo
from telegrad.wire import Tag
from telegrad.worker import lifecycle_log, process_hooks
from telegrad.worker.autograd_hooks import AutogradHooks, WorkerPlugins
from telegrad.worker.calls.client import Calls
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.messages import Messages
from telegrad.worker.closed import AnyEngine, AnyServer, ClosedEngine
from telegrad.worker.native import ENVIRONMENT, make_engine, make_server
from telegrad.worker.refs.references import References
from telegrad.worker.scope import Scope, current
from telegrad.worker.serving.dispatch import Dispatcher
from telegrad.worker.serving.event_loop import EventLoop
from telegrad.worker.serving.handlers import Handlers
from telegrad.worker.serving.thread_pool import COMPLETION, EVENT, ONEWAY, ThreadPool
from telegrad.worker.shutdown_barrier import ShutdownBarrier
from telegrad.worker.timers import Timers
from telegrad.worker.unread_failures import log_unread

__all__ = ["Worker"]

logger: logging.Logger = logging.getLogger("telegrad")

_SECOND = 1_000_000_000
_RELEASE_DELAY = 5_000_000  # ns that releases of references wait for others to travel with
_STOP_LINGER = 2.0  # s that bytes already sent may take to leave at the end
_DRAIN_STEP = 0.005  # s between two looks at what is still under way
_JOIN_TIMEOUT = 5.0  # s that handlers may still run at the end before they are left behind

_numbers = itertools.count()
_outer: ContextVar[tuple[Scope | None, ...]] = ContextVar("telegrad_outer_scopes", default=())


class Worker:
    """One member of a group. Made by `telegrad.rpc.init_rpc` (or `telegrad.rpc.Worker`), which waits for the others.

    Args:
        info: its name and id.
        group: what its members agree on.
        options: see `telegrad.options`.
        store_at: the host of the store, which decides the address to listen on.
        first_id: where ids of references start.
        plugins: what the plugins above bring.
    """

    def __init__(
        self, info: WorkerInfo, group: Group, options: Options, store_at: str, first_id: int, plugins: WorkerPlugins
    ) -> None:
        self.info = info
        self.group = group
        self.options = options
        self.incarnation: int = secrets.randbits(63) | 1
        self.static = True
        self.store: Any = None
        self.closed: bool = False
        self.joined: bool = False
        self.is_leaving: bool = False
        self.ready: threading.Event = threading.Event()  # all members are known: requests may run
        self.lost_peers: dict[int, str] = {}  # workers that are gone, and why
        self.departed_peers: set[int] = set()  # those of them who said goodbye
        self.gone_at_shutdown: set[int] = (
            set()
        )  # those of them on whom the whole group agreed when it began to shut down
        self.attachments: dict[str, Any] = {}  # what the plugins above keep for this worker
        self.loss_listeners: list[Callable[[], Any]] = []
        self._infos: dict[str | int, WorkerInfo] = {info.name: info, info.id: info}
        self._members: dict[int, Member] = {}
        self._retired: set[int] = set()  # ids whose workers have left the group
        self._names: dict[int, str] = {info.id: info.name}  # theirs too, for messages
        self._lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closing_thread: int | None = None  # the thread that closes it
        self._close_done = threading.Event()  # it is closed, and all its threads have ended or been left behind
        self.shutdown_lock: threading.Lock = threading.Lock()  # held while a graceful shutdown is under way
        self._idle_check = threading.Event()  # never set: paces `drain`

        listen, host = addresses.listen_addresses(options, store_at, info.name)
        if group.shared_secret and not addresses.is_loopback(host):
            logger.warning(
                "worker %s listens on %s, and its group has no secret of its own: whoever can reach the store can call"
                " functions here. Set TELEGRAD_SECRET (or the option secret) on all workers.",
                info.name,
                host,
            )
        self.engine: AnyEngine = make_engine(info, self.incarnation, group, options)
        bound = [self.engine.listen(address) for address in listen]
        self.host: str = addresses.host_key()
        self.member: Member = Member(
            info.id, info.name, self.incarnation, addresses.advertised(bound, options, store_at), self.host
        )
        to_self = self.engine.listen(f"inproc:{os.getpid()}-{next(_numbers)}-{info.name}")
        self.engine.set_peer(info.id, info.name, self.incarnation, [to_self])

        self.references: References = References(
            info.id,
            first_id,
            self.name_of,
            self._send_reference_message,
            lambda: self.engine.request_callback(_RELEASE_DELAY),
            lambda rref, owner, fork: plugins.rref_type.of(self, rref, owner, fork),
        )
        self.autograd: AutogradHooks = plugins.make_autograd(self, first_id)
        self.messages: Messages = Messages(
            plugins.rref_type,
            self._share,
            self.references.unshare,
            self.references.receive,
            self.references.new_id,
            self.autograd,
            self.name_of,
        )
        self.calls: Calls = Calls(
            self.engine,
            self.messages,
            self.resolve_worker,
            self.name_of,
            info.id,
            self._infos,
            options.rpc_timeout,
            ENVIRONMENT,
        )
        self.timers: Timers = Timers(f"telegrad-{info.name}-timers")
        self.loop: EventLoop = EventLoop(f"telegrad-{info.name}-loop", self._submit, self.timers.call_later)
        self.handlers: Handlers = Handlers(
            self, info, self.engine, self.messages, self.references, self.loop, options.remote_error_number()
        )
        self.callback_scope: Scope = Scope(self, 0, True)
        self.server: AnyServer = make_server(self, self.callback_scope)
        self.handlers.update_recording()
        self.calls.delay = self.timers.call_later
        # The group ends in two stages: all work is done, then all references are given up.
        self.stages: tuple[ShutdownBarrier, ...] = tuple(
            ShutdownBarrier(
                info.id,
                self.ensure_connected,
                partial(self._send_shutdown_message, stage),
                self.timers.call_later,
                self._activity,
            )
            for stage in range(2)
        )
        self.dispatcher: Dispatcher = Dispatcher(self)
        self.pool: ThreadPool = ThreadPool(
            self.engine,
            self.server,
            info.name,
            {
                ONEWAY: self.dispatcher.on_message,
                COMPLETION: self.dispatcher.on_completion,
                EVENT: self.dispatcher.on_event,
            },
        )
        self.pool.start()
        process_hooks.register(self)

    def __repr__(self) -> str:
        return f"Worker(name={self.info.name!r}, id={self.info.id}, group of {len(self.infos())})"

    # ---- who is there

    def add_member(self, member: Member) -> None:
        """Another worker of the group, to be connected to when it is first called."""
        if member.id == self.info.id:
            return
        info = WorkerInfo(member.name, member.id)
        with self._lock:
            known = self._members.get(member.id)
            self._members[member.id] = member
            self._names[member.id] = member.name
            self._infos[member.name] = self._infos[member.id] = info
            was_here = member.id in self._retired
            self._retired.discard(member.id)
        if known is not None and known.incarnation != member.incarnation:
            why = "a new worker has taken its place"
            self.references.peer_lost(member.id, why)
            self.autograd.peer_lost(member.id, why)
            was_here = True
        if was_here:
            self.lost_peers.pop(member.id, None)
            self.departed_peers.discard(member.id)
            self.references.peer_joined(member.id)
        usable = addresses.candidates(member.addresses, member.host == self.host, self.options.transports)
        self.engine.set_peer(member.id, member.name, member.incarnation, usable)

    def retire_member(self, worker_id: int) -> None:
        """A worker is about to leave the group: no more calls to it. Those under way go on."""
        with self._lock:
            member = self._members.pop(worker_id, None)
            if member is not None:
                self._infos.pop(member.name, None)
                self._infos.pop(worker_id, None)
                self._retired.add(worker_id)

    def remove_member(self, worker_id: int, why: str) -> None:
        """A worker has left the group."""
        self.retire_member(worker_id)
        self.engine.disconnect(worker_id, why)
        self.references.peer_lost(worker_id, why)
        self.autograd.peer_lost(worker_id, why)
        lifecycle_log.peer_left(self, worker_id, why)
        self.departed_peers.add(worker_id)
        self.lost_peers[worker_id] = why
        for listener in list(self.loss_listeners):
            listener()

    def member_of(self, worker_id: int) -> Member | None:
        """What another worker has told the group of itself; None if it is not in the group."""
        return self._members.get(worker_id)

    def member_ids(self) -> set[int]:
        """Ids of the other workers."""
        with self._lock:
            return set(self._members)

    def infos(self) -> list[WorkerInfo]:
        """All workers of the group, in the order of their ids."""
        with self._lock:
            return sorted({id(i): i for i in self._infos.values()}.values(), key=lambda info: info.id)

    def resolve_worker(self, to: object) -> WorkerInfo:
        """A worker by its name, id or info.

        Raises:
            ValueError: it is none of these.
            UnknownWorker: there is no such worker.
        """
        if isinstance(to, WorkerInfo):
            to = to.id
        if isinstance(to, (str, int)):
            info = self._infos.get(to)
            if info is not None:
                return info
            if not self.static:
                self._read_store()
                info = self._infos.get(to)
                if info is not None:
                    return info
            raise UnknownWorker((self.info.name, self.info.id), to, tuple(i.name for i in self.infos()))
        raise ValueError(f"Cannot get WorkerInfo from name {to}")

    def _read_store(self) -> None:
        """A dynamic group may have a member of which the news has not come yet."""
        if self.store is None:
            return
        try:
            members = rendezvous.read_members(self.store, self.group)
        except rendezvous.StoreGone:  # with its host: nobody can have joined
            return
        for member in members:
            if member.id not in self._members:
                self.add_member(member)

    def name_of(self, worker_id: int) -> str:
        """For messages: a worker's name, whoever it is."""
        return self._names.get(worker_id, f"(id {worker_id})")

    # ---- calls

    def rpc_sync(self, to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = -1.0) -> Any:
        """See `telegrad.rpc.rpc_sync`."""
        calls = self.calls
        within = calls.default_timeout if timeout == -1.0 else calls.timeout(timeout)
        return calls.client.call(to, func, args, kwargs, within)

    def rpc_async(
        self, to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = -1.0
    ) -> CallFuture[Any]:
        """See `telegrad.rpc.rpc_async`."""
        calls = self.calls
        within = calls.default_timeout if timeout == -1.0 else calls.timeout(timeout)
        future: CallFuture[Any] = calls.client.start(to, func, args, kwargs, within)
        return future

    def start_internal(self, to: int, func: Any, args: Sequence[Any], timeout: float) -> CallFuture[Any]:
        """A call of Telegrad's own, which a shutdown does not wait for."""
        calls = self.calls
        future: CallFuture[Any] = calls.client.start(
            to, func, tuple(args), {}, calls.timeout(timeout), None, False, True
        )
        return future

    def __enter__(self) -> "Worker":
        """Makes it the current worker of this context: calls of `telegrad.rpc` go through it."""
        outer = current.get()
        _outer.set((*_outer.get(), outer))
        # Within a handler it stays one: calls through any worker end with the request that they are made for.
        if outer is None:
            current.set(Scope(self, 0, False))
        elif outer.worker is self:
            current.set(outer)
        else:  # an autograd context, and a connection, is one worker's
            current.set(outer._replace(worker=self, autograd=None, connection=0))
        return self

    def __exit__(self, *_: object) -> None:
        *others, outer = _outer.get()
        _outer.set(tuple(others))
        current.set(outer)

    # ---- references

    def _share(self, handle: Any, peer: int) -> Ticket:
        holder: Worker = handle.worker
        if holder is not self:
            raise RRefError(
                f"{handle!r} belongs to another group, that of worker {holder.info.name}; it cannot travel in"
                f" calls of worker {self.info.name}. Send its value instead."
            )
        handle._mark_used()
        return self.references.share(handle.id, handle.owner_id, peer)

    def _send_reference_message(self, peer: int, plain: Any, kind: str) -> None:
        message = self.messages.encode(peer, plain)

        def send() -> None:
            self.engine.send(peer, int(Tag.REFERENCES), message.flags, message.body, message.segments)

        self.calls.send_filtered(kind, False, peer, send)

    def _submit(self, job: Callable[..., None], *arguments: Any) -> None:
        self.pool.submit(job, *arguments)

    # ---- the end

    @contextmanager
    def on_loss(self, listener: Callable[[], Any]) -> Iterator[None]:
        """Within, `listener` is called when a worker is lost or leaves. It must not block."""
        self.loss_listeners.append(listener)
        try:
            yield
        finally:
            self.loss_listeners.remove(listener)

    def departed_names(self) -> set[str]:
        """Names of those who said goodbye."""
        return self._names_of(self.departed_peers)

    def lost_names(self) -> set[str]:
        """Names of the workers that are gone."""
        return self._names_of(self.lost_peers)

    def _names_of(self, gone: Iterable[int]) -> set[str]:
        """Whoever has come again, with another id, is not gone."""
        rows = [(self.name_of(peer), peer) for peer in list(gone)]
        return {name for name, peer in rows if getattr(self._infos.get(name), "id", peer) == peer}

    def _activity(self) -> tuple[int, int]:
        """Requests received so far, and calls and requests under way."""
        stats = self.engine.stats()
        return stats["requests"], stats["pending_calls"] + stats["queued_requests"] + stats["running_requests"]

    def _send_shutdown_message(self, stage: int, peer: int, plain: Any) -> None:
        message = self.messages.encode(peer, (stage, plain))
        self.engine.send(peer, int(Tag.SHUTDOWN), message.flags, message.body, message.segments)

    def ensure_connected(self, peers: Iterable[int]) -> None:
        """Sees to it that there are links to these workers, so that their end is noticed."""
        for peer in peers:
            self.engine.send(peer, int(Tag.CONNECT), 0, b"", None)

    def set_members(self, members: Sequence[int]) -> None:
        """The other workers of a static group. Called before anybody can shut down."""
        for stage in self.stages:
            stage.set_members(members)

    def finish(self, timeout: float, last: bool) -> None:
        """Waits until all workers of a static group shut down and all their work is done.

        Args:
            timeout: seconds; 0 is no limit.
            last: once more, when all have given up their references; then this worker leaves.

        Raises:
            ShutdownTimeout: some did not come in time, or gave up and left.
        """
        self.is_leaving = last
        budget = SharedDeadline(timeout)
        end = self.stages[last].run(timeout, last)
        if self.closed:
            raise NotInitialized(f"{NotInitialized.CALL} (Another thread has shut the worker down meanwhile.)")
        if isinstance(end, GaveUp):
            rendezvous.mark_abandoned(self.store, budget.left())
            raise ShutdownTimeout(timeout, tuple(self.name_of(worker) for worker in end.missing))
        gone = (*end.lost, *end.left)
        if gone and not last and rendezvous.is_abandoned(self.store, budget.left()):
            raise ShutdownTimeout(timeout, tuple(map(self.name_of, gone)), gave_up=True)
        self.gone_at_shutdown.update(end.lost, end.left)
        for worker in end.lost if last else ():
            if worker not in self.lost_peers:
                lifecycle_log.lost(self, worker, "others noticed; this worker had no connection to it")

    def drain(self, timeout: float) -> bool:
        """Waits until no call of this worker is under way and no request runs here. False: not in `timeout` seconds
        (0 is no limit)."""
        deadline = time.monotonic() + timeout if timeout else None
        while self._activity()[1]:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._idle_check.wait(_DRAIN_STEP)
        return True

    def close(self, interrupted: bool = False) -> None:
        """Leaves the group without waiting for anybody. Calls under way fail, handlers under way are waited for for a
        few seconds. Safe to call again, from any thread, and from a handler: a second one waits for the first,
        unless that waits for its thread. `interrupted`: by Ctrl+C, which needs no warnings."""
        with self._close_lock:
            first, self.closed = not self.closed, True
            if first:
                self._closing_thread = threading.get_ident()
        if first:
            try:
                self._close(interrupted)
            finally:
                self._close_done.set()
        elif not self._must_not_wait():
            self._close_done.wait()

    def _must_not_wait(self) -> bool:
        """Does the thread that closes the worker wait for the calling one, if it is not the same?"""
        return (
            self._closing_thread == threading.get_ident()
            or self.owns_current_thread()
            or self.timers.owns_current_thread()
        )

    def owns_current_thread(self) -> bool:
        """Is the calling thread one that runs handlers and callbacks of this worker? Takes no lock."""
        return self.pool.owns_current_thread() or self.loop.owns_current_thread()

    def _close(self, interrupted: bool) -> None:
        self.ready.set()
        for stage in self.stages:
            stage.stop()
        self.references.closed = True
        self.engine.stop(int(_STOP_LINGER * _SECOND))
        try:
            until = time.monotonic() + _JOIN_TIMEOUT
            ends = (self.timers.stop, self.loop.stop, self.pool.join)
            if False in [end(max(0.0, until - time.monotonic())) for end in ends]:
                level = logging.INFO if interrupted else logging.WARNING
                logger.log(level, "worker %s shut down while a handler still ran; it was left behind", self.info.name)
        finally:
            self.calls.send_filter = None
            self.autograd.close()
            self.references.close()
            assert isinstance(self.engine, _core.Engine)
            self._replace_engine(ClosedEngine(self.engine))
            self.store = None  # its host may end
            _core.release()
            process_hooks.live_workers.discard(self)
            log_unread()
            if self.joined:
                lifecycle_log.left(self)

    def detach_after_fork(self) -> AnyEngine:
        """In a forked child: here the worker, which is the parent's, is as good as closed. Returns the parent's engine,
        which must neither be used nor freed."""
        self.closed = True
        self._close_done = threading.Event()  # not the parent's, whose lock a thread may have
        self._close_done.set()
        self.references.detach_after_fork()
        self.autograd.detach_after_fork()
        engine = self.engine
        self._replace_engine(ClosedEngine(None))
        return engine

    def _replace_engine(self, ended: ClosedEngine) -> None:
        """Lets go of the engine: it ends with the last thread that is inside one of its methods."""
        self.engine = self.server = self.calls.engine = self.calls.client = self.handlers.engine = ended
        self.pool.replace_engine(ended)

    @property
    def busy(self) -> bool:
        """Is there a call or a backward pass of this worker's under way?"""
        return bool(self.engine.stats()["pending_calls"]) or self.autograd.busy

    def require_open(self) -> None:
        """Raises NotInitialized after `close`."""
        if self.closed:
            raise NotInitialized
