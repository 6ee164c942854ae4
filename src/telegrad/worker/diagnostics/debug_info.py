"""Snapshot of a worker, and its text for a terminal."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["BytesInfo", "CountsInfo", "DebugInfo", "PeerInfo", "ReferencesInfo", "RequestInfo"]


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Request that this worker serves.

    Attributes:
        function: name of the handler.
        caller: name of the calling worker; None if the core has not passed it on.
        state: ``"running"`` on a thread, or ``"deferred"``: a coroutine or a future that is not done.
        age: seconds since this worker first saw it in this state; the request has been in it for at least as long.
        time_left: seconds until its deadline; None without one.
        thread: name of the thread; empty if deferred.
    """

    function: str
    caller: str | None
    state: str
    age: float
    time_left: float | None = None
    thread: str = ""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Another worker of the group.

    Attributes:
        name: its name.
        id: its id.
        state: ``"connected"``, ``"not connected"`` (no call has connected yet), ``"lost"`` or ``"left"``.
        transport: transport of the first connection, such as ``"shm"``; empty without one.
        connection: direction and address of the first connection, such as ``"to tcp:10.0.0.2:41023"``.
        why_not_faster: why no transport is used that the options prefer; empty if the best one is used.
        reason: why it is lost or has left.
    """

    name: str
    id: int
    state: str
    transport: str = ""
    connection: str = ""
    why_not_faster: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CountsInfo:
    """Queues, calls and threads.

    Attributes:
        pending_calls: calls of this worker without a reply.
        queued_requests: requests that wait for a thread.
        running_requests: requests that threads run.
        deferred_requests: requests with a result that is not done: a coroutine or a future.
        parked_requests: requests that wait for a reference.
        pool_threads: threads of the pool.
        connections: open connections.
        lanes: additional TCP connections.
        sent_messages: messages sent since the start.
        received_messages: messages received since the start.
    """

    pending_calls: int
    queued_requests: int
    running_requests: int
    deferred_requests: int
    parked_requests: int
    pool_threads: int
    connections: int
    lanes: int
    sent_messages: int
    received_messages: int


@dataclass(frozen=True, slots=True)
class ReferencesInfo:
    """Remote references.

    Attributes:
        owned: values that this worker owns.
        expected: of these, without their creation, which has not arrived.
        forks: references of other workers to them.
        used: values of other workers that this worker refers to.
        pending: of these, not confirmed by their owner.
        pending_creations: calls of ``remote`` without a reply.
    """

    owned: int
    expected: int
    forks: int
    used: int
    pending: int
    pending_creations: int


@dataclass(frozen=True, slots=True)
class BytesInfo:
    """Memory of received messages.

    Attributes:
        received_in_use: bytes of received messages that tensors use.
        received_cached: freed bytes that are kept for reuse (option ``pool_cache_bytes``).
        blocks_in_use: blocks of these bytes.
        blocks_cached: freed blocks.
    """

    received_in_use: int
    received_cached: int
    blocks_in_use: int
    blocks_cached: int


@dataclass(frozen=True, slots=True)
class DebugInfo:
    """Snapshot of a worker; ``str()`` is a text for the terminal.

    Attributes:
        worker: name of the worker.
        id: its id.
        closed: it has left its group.
        counts: queues, calls and threads.
        requests: requests that it serves, oldest first.
        retries: calls that wait for their next attempt or its reply, see `telegrad.rpc.Retry`.
        peers: the other workers of the group, and lost workers.
        references: its remote references; None if another thread holds their table for long.
        contexts: number of autograd contexts.
        passes: number of backward passes in progress.
        bytes: memory of received messages.
        threads: names of the threads of its pool.
        options: the options in force, without secrets.

    Example::

        info = rpc.debug_info()
        print(info.counts.queued_requests, info.requests)  # 0 ()
        print(info)  # all of it, for people
    """

    worker: str
    id: int
    closed: bool
    counts: CountsInfo
    requests: tuple[RequestInfo, ...]
    retries: tuple[str, ...]
    peers: tuple[PeerInfo, ...]
    references: ReferencesInfo | None
    contexts: int
    passes: int
    bytes: BytesInfo
    threads: tuple[str, ...]
    options: dict[str, object]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        closed = ", closed" if self.closed else ""
        yield f"worker {self.worker} (id {self.id}{closed})"
        yield f"  counts: {_facts(self.counts)}"
        yield f"  requests that it serves: {len(self.requests) or 'none'}"
        for request in self.requests:
            yield f"    {_request(request)}"
        if self.retries:
            yield f"  calls with retry: {'; '.join(self.retries)}"
        yield f"  peers: {len(self.peers) or 'none'}"
        for peer in self.peers:
            yield f"    {_peer(peer)}"
        references = "not readable: another thread holds their table"
        yield f"  references: {references if self.references is None else _facts(self.references)}"
        yield f"  autograd: {self.contexts} contexts, {self.passes} passes"
        yield f"  bytes: {_facts(self.bytes)}"
        yield f"  threads: {', '.join(self.threads) or 'none'}"
        yield f"  options: {', '.join(f'{name}={value!r}' for name, value in self.options.items())}"


def _facts(part: object) -> str:
    names: Iterable[str] = part.__dataclass_fields__  # type: ignore[attr-defined]
    return ", ".join(f"{name.replace('_', ' ')} {getattr(part, name)}" for name in names)


def _request(request: RequestInfo) -> str:
    caller = "an unknown caller" if request.caller is None else request.caller
    left = "" if request.time_left is None else f", {request.time_left:.1f} s left"
    thread = f", on {request.thread}" if request.thread else ""
    return f"{request.function} from {caller}: {request.state} for at least {request.age:.1f} s{left}{thread}"


def _peer(peer: PeerInfo) -> str:
    state = peer.state if peer.state != "connected" else f"connected {peer.connection}{peer.why_not_faster}"
    reason = f": {peer.reason}" if peer.reason else ""
    return f"{peer.name} (id {peer.id}) {state}{reason}"
