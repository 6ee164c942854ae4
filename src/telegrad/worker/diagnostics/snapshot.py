"""Collects the snapshot of a worker.

A snapshot is for a worker that hangs. So it takes no lock that a handler, a finalizer or a waiting thread may hold for
long: it waits for the table of references at most `_LOCK_TIMEOUT`, and for the core's mutex, under which no Python
code runs.
"""

import dataclasses
import time
from typing import Any, Protocol

from telegrad import _core
from telegrad.group.addresses import transport_of
from telegrad.options import Options
from telegrad.serialize.function_names import readable
from telegrad.types import WorkerInfo
from telegrad.wire import RequestStateText
from telegrad.worker import lifecycle_log
from telegrad.worker.autograd_hooks import AutogradHooks
from telegrad.worker.calls.callables import full_name_of
from telegrad.worker.calls.client import Calls
from telegrad.worker.calls.interceptors import carriers, internal
from telegrad.worker.calls.messages import Messages
from telegrad.worker.calls.retrying import Retries
from telegrad.worker.closed import AnyEngine
from telegrad.worker.diagnostics.debug_info import (
    BytesInfo,
    CallInfo,
    ConnectionInfo,
    CountsInfo,
    DebugInfo,
    LimitInfo,
    MemberInfo,
    MembershipInfo,
    PeerInfo,
    ReferencesInfo,
    ServedRequestInfo,
)
from telegrad.worker.diagnostics.running import RunningHandlers
from telegrad.worker.membership.members import Members
from telegrad.worker.membership.service import MembershipService
from telegrad.worker.refs.references import References
from telegrad.worker.serving.handlers import Handlers
from telegrad.worker.serving.once import RememberedRuns
from telegrad.worker.serving.thread_pool import ThreadPool

__all__ = ["snapshot"]

_LOCK_TIMEOUT = 0.2  # s; a thread that was suspended with the lock needs no longer to continue
_UNNAMED = "a function by value, or a value"
_INTERNAL = "a message that Telegrad processes"


class Inspected(lifecycle_log.Joined, Protocol):
    """`telegrad.worker.worker.Worker`, as this module uses it."""

    info: WorkerInfo
    options: Options
    incarnation: int
    closed: bool
    engine: AnyEngine
    calls: Calls
    retries: Retries
    messages: Messages
    handlers: Handlers
    pool: ThreadPool
    running: RunningHandlers
    remembered_runs: RememberedRuns
    members: Members
    membership: MembershipService | None
    references: References
    autograd: AutogradHooks[Any]


def snapshot(worker: Inspected) -> DebugInfo:
    """Return a snapshot of a worker.

    Any thread may call this, also if the worker hangs.
    """
    core: _core.Snapshot | None
    core, targets = worker.engine.snapshot()
    stats = worker.engine.stats()
    requests = [] if core is None else _requests(worker, core)
    states = [request.state for request in requests]
    autograd = worker.autograd.stats()
    references = _references(worker)
    return DebugInfo(
        worker=worker.info.name,
        id=worker.info.id,
        incarnation=worker.incarnation,
        closed=worker.closed,
        counts=CountsInfo(
            pending_calls=stats["pending_calls"],
            queued_requests=stats["queued_requests"],
            running_requests=stats["running_requests"],
            deferred_requests=states.count(RequestStateText.DEFERRED),
            parked_requests=states.count(RequestStateText.PARKED),
            pool_threads=stats["pool_threads"],
            connections=stats["connections"],
            lanes=stats["lanes"],
            sent_messages=stats["sent_messages"],
            received_messages=stats["received_messages"],
        ),
        calls=() if core is None else tuple(_calls(worker, core, targets)),
        retries=worker.retries.describe(),
        requests=tuple(requests),
        peers=tuple(_peers(worker, core)),
        connections=() if core is None else tuple(_connections(worker, core)),
        membership=_membership(worker),
        references=references,
        contexts=autograd["num_autograd_contexts"],
        kept_graphs=worker.autograd.kept_graphs,
        passes=autograd["num_current_backward_passes"],
        bytes=BytesInfo(
            received_in_use=stats["live_bytes"],
            received_cached=stats["cached_bytes"],
            blocks_in_use=stats["live_blocks"],
            blocks_cached=stats["cached_blocks"],
        ),
        limits=_limits(worker, core, references),
        threads=tuple(sorted(thread.name for thread in worker.pool.contexts.copy())),
        options={
            field.name: getattr(worker.options, field.name)
            for field in dataclasses.fields(worker.options)
            if field.repr
        },
    )


def _calls(worker: Inspected, core: _core.Snapshot, targets: dict[int, object]) -> list[CallInfo]:
    names, connected = worker.calls.names.texts(), {peer.id for peer in core.peers if peer.connection}
    retried, own = worker.retries.functions(), {full_name_of(each) for each in (*carriers, *internal)}
    calls = []
    for call in sorted(core.calls, key=lambda call: call.since):
        text = names.get(call.name_id)
        function = retried.get(call.id) or (_UNNAMED if text is None else readable(text))
        if text is None or function in own:
            function = _label(targets.get(call.id))
        waits_for = "the window" if call.peer in connected else "a connection"
        state = "sent" if call.connection else f"waiting for {waits_for}"
        calls.append(CallInfo(function, worker.members.name_of(call.peer), state, (core.at - call.since) / 1e9))
    return calls


def _label(target: object) -> str:
    """Return the function of a call, from its future or reference."""
    _, function, _ = getattr(target, "_request", (-1, _UNNAMED, 0))
    return function if isinstance(function, str) else full_name_of(function)


def _requests(worker: Inspected, core: _core.Snapshot) -> list[ServedRequestInfo]:
    """Return the requests, with functions and threads that only Python knows."""
    deferring, retried = worker.handlers.deferred_requests(), worker.remembered_runs.functions()
    running = {each.key: each for each in worker.running.snapshot()}
    since = {(each.connection, each.call): each.since for each in core.requests}
    found = []
    for each in core.requests:
        key = (each.connection, each.call)
        if key in deferring:
            continue
        age, caller = (core.at - each.since) / 1e9, worker.members.name_of(each.peer)
        on_thread = running.get(key)
        if each.state == RequestStateText.QUEUED:
            left = (each.deadline - core.at) / 1e9 if each.deadline else None
            found.append(ServedRequestInfo(_function(each.name), caller, each.state, age, left))
        elif on_thread is not None:
            function = retried.get(key) or on_thread.function
            found.append(ServedRequestInfo(function, caller, "running", age, on_thread.time_left, on_thread.thread))
        elif each.state == RequestStateText.PARKED:
            found.append(ServedRequestInfo(_function(each.name), caller, each.state, age))
        else:
            found.append(ServedRequestInfo(_INTERNAL, caller, each.state, age))
    for key, request in deferring.items():
        age = (core.at - since.get(key, int(request.since * 1e9))) / 1e9
        left = (request.deadline - core.at) / 1e9 if request.deadline else None
        function = retried.get(key) or request.function
        found.append(ServedRequestInfo(function, worker.members.name_of(request.peer), "deferred", max(age, 0.0), left))
    return sorted(found, key=lambda request: -request.age)


def _function(name: bytes) -> str:
    return readable(name) if name else _UNNAMED


def _peers(worker: Inspected, core: _core.Snapshot | None) -> list[PeerInfo]:
    members = worker.members
    lost, departed = members.lost.copy(), members.departed.copy()
    sessions = {} if core is None else {peer.id: peer for peer in core.peers}
    connections = {} if core is None else {each.id: each for each in core.connections}
    peers = []
    for number in sorted(members.ids() | lost.keys()):
        name, session = members.name_of(number), sessions.get(number)
        info = PeerInfo(name, number, "not connected")
        if session is not None:
            info = dataclasses.replace(
                info, incarnation=session.incarnation, epoch=session.epoch, waiting=session.pending
            )
        connection = None if session is None else connections.get(session.connection)
        if connection is not None:
            scheme = connection.address.partition(":")[0]
            why = lifecycle_log.why_not_faster(worker, number, name, transport_of(scheme))
            info = dataclasses.replace(
                info,
                state="connected",
                transport=scheme,
                connection=_where(connection),
                why=why or "the first of the option transports that both offer",
            )
        elif number in lost:
            state = "left" if number in departed else "lost"
            info = dataclasses.replace(info, state=state, reason=lost[number])
        elif session is not None:
            state = "connecting" if session.connecting else info.state
            info = dataclasses.replace(info, state=state, reason=session.last_error)
        peers.append(info)
    return peers


def _connections(worker: Inspected, core: _core.Snapshot) -> list[ConnectionInfo]:
    return [
        ConnectionInfo(
            peer=worker.members.name_of(each.peer) if each.peer >= 0 else "",
            state="open" if each.open else "handshake",
            where=_where(each),
            lanes=each.lanes,
            unprocessed=each.unprocessed,
            stalled=each.stalled,
        )
        for each in sorted(core.connections, key=lambda each: each.id)
    ]


def _where(connection: _core.ConnectionSnapshot) -> str:
    if connection.initiator:
        return f"to {connection.address}"
    transport = connection.address.partition(":")[0]
    return f"from {transport}:{connection.source}" if connection.source else f"from {transport}"


def _membership(worker: Inspected) -> MembershipInfo | None:
    service = worker.membership
    if service is None:
        return None
    ages = service.lease_ages()
    members = [
        MemberInfo(seat.name, seat.id, seat.incarnation, ages.get(seat.id))
        for seat in service.log.view.members.copy().values()
    ]
    return MembershipInfo(
        epoch=service.log.view.epoch,
        members=tuple(sorted(members, key=lambda member: member.id)),
        lease=service.timing.lifetime,
        renewed=time.monotonic() - service.renewed,
    )


def _limits(worker: Inspected, core: _core.Snapshot | None, references: ReferencesInfo | None) -> dict[str, LimitInfo]:
    found = (
        {} if core is None else {each.option: LimitInfo(each.used, each.limit, each.refused) for each in core.limits}
    )
    codec, options = worker.messages.serializer.codec, worker.options
    found["max_objects"] = LimitInfo(codec.most_objects, codec.max_objects, codec.refused)
    runs = worker.remembered_runs
    found["retry_results_bytes"] = LimitInfo(runs.nbytes, runs.max_bytes, runs.drops)
    held = 0 if references is None else references.owned + references.used
    found["warn_references"] = LimitInfo(held, options.warn_references)
    contexts = worker.autograd.stats()["num_autograd_contexts"]
    found["warn_contexts"] = LimitInfo(contexts, options.warn_contexts)
    return found


def _references(worker: Inspected) -> ReferencesInfo | None:
    references = worker.references
    lock = references.lock
    if not lock.acquire(timeout=_LOCK_TIMEOUT):
        return None
    try:
        stats = references.table.stats()
    finally:
        lock.release()
    return ReferencesInfo(
        owned=stats.owners,
        expected=stats.expected,
        forks=stats.forks,
        used=stats.users,
        pending=stats.pending_users,
        pending_creations=references.pending_creations,
    )
