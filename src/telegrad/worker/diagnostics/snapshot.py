"""Collects the snapshot of a worker.

A snapshot is for a worker that hangs. So it takes no lock that a handler, a finalizer or a waiting thread may hold for
long: it waits for the table of references at most `_LOCK_TIMEOUT`, and for the core's mutex, under which no Python
code runs.
"""

import dataclasses
import time
from typing import Any

from telegrad.worker import lifecycle_log
from telegrad.worker.diagnostics.debug_info import (
    BytesInfo,
    CountsInfo,
    DebugInfo,
    PeerInfo,
    ReferencesInfo,
    RequestInfo,
)

__all__ = ["snapshot"]

_LOCK_TIMEOUT = 0.2  # s; a thread that was suspended with the lock needs no longer to continue


def snapshot(worker: Any) -> DebugInfo:
    """Return a snapshot of a worker.

    Any thread may call this, also if the worker hangs.
    """
    stats = worker.engine.stats()
    requests = _requests(worker)
    deferred = worker.handlers.async_calls
    autograd = worker.autograd.stats()
    return DebugInfo(
        worker=worker.info.name,
        id=worker.info.id,
        closed=worker.closed,
        counts=CountsInfo(
            pending_calls=stats["pending_calls"],
            queued_requests=stats["queued_requests"],
            running_requests=stats["running_requests"],
            deferred_requests=deferred,
            parked_requests=max(stats["detached_requests"] - deferred, 0),
            pool_threads=stats["pool_threads"],
            connections=stats["connections"],
            lanes=stats["lanes"],
            sent_messages=stats["sent_messages"],
            received_messages=stats["received_messages"],
        ),
        requests=tuple(requests),
        retries=worker.retries.describe(),
        peers=tuple(_peers(worker)),
        references=_references(worker),
        contexts=autograd["num_autograd_contexts"],
        passes=autograd["num_current_backward_passes"],
        bytes=BytesInfo(
            received_in_use=stats["live_bytes"],
            received_cached=stats["cached_bytes"],
            blocks_in_use=stats["live_blocks"],
            blocks_cached=stats["cached_blocks"],
        ),
        threads=tuple(sorted(thread.name for thread in worker.pool.contexts.copy())),
        options={
            field.name: getattr(worker.options, field.name)
            for field in dataclasses.fields(worker.options)
            if field.repr
        },
    )


def _requests(worker: Any) -> list[RequestInfo]:
    callers, deferring = worker.handlers.callers, worker.handlers.deferred_requests()
    running = [
        RequestInfo(each.function, callers.name_of(each.key[0]), "running", each.seen_for, each.time_left, each.thread)
        for each in worker.running.snapshot()
        if each.key not in deferring  # its thread is about to leave it
    ]
    now = time.monotonic()
    deferred = [
        RequestInfo(
            request.function,
            worker.members.name_of(request.peer),
            "deferred",
            now - request.since,
            request.deadline / 1e9 - now if request.deadline else None,
        )
        for request in deferring.values()
    ]
    return sorted(running + deferred, key=lambda request: -request.age)


def _peers(worker: Any) -> list[PeerInfo]:
    members, peers = worker.members, []
    lost, departed, connected = members.lost.copy(), members.departed.copy(), members.links.copy()
    for peer in sorted(members._members.copy() | lost):
        name, reason = members.name_of(peer), lost.get(peer, "")
        if peer in lost:
            peers.append(PeerInfo(name, peer, "left" if peer in departed else "lost", reason=reason))
        elif peer in connected:
            _, direction, address = connected[peer].split(" ", 2)
            transport = address.partition(":")[0]
            why = lifecycle_log.why_not_faster(worker, peer, name, transport)
            peers.append(PeerInfo(name, peer, "connected", transport, f"{direction} {address}", why))
        else:
            peers.append(PeerInfo(name, peer, "not connected"))
    return peers


def _references(worker: Any) -> ReferencesInfo | None:
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
