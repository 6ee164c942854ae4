"""Snapshot of a worker, and its text for a terminal."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = [
    "BytesInfo",
    "CallInfo",
    "ConnectionInfo",
    "CountsInfo",
    "DebugInfo",
    "LimitInfo",
    "MemberInfo",
    "MembershipInfo",
    "PeerInfo",
    "ReferencesInfo",
    "ServedRequestInfo",
]

_MOST_LINES = 20  # of one part in the text


@dataclass(frozen=True, slots=True)
class CallInfo:
    """Call of this worker without a reply.

    Attributes:
        function: name of the function.
        to: name of the callee.
        state: ``"sent"``, ``"waiting for a connection"``, or ``"waiting for the window"``: the callee has too many
            bytes of requests already (option ``request_window_bytes``).
        age: seconds since the call was made; of a call with a `Retry`, since its last attempt.
    """

    function: str
    to: str
    state: str
    age: float


@dataclass(frozen=True, slots=True)
class ServedRequestInfo:
    """Request that this worker serves.

    Attributes:
        function: name of the handler.
        caller: name of the calling worker.
        state: ``"queued"``, ``"running"`` on a thread, ``"parked"``: it waits for a reference, or ``"deferred"``: its
            coroutine or future is not done.
        age: seconds since it was queued, or since a thread took it.
        time_left: seconds until its deadline; None without one, or if parked.
        thread: name of the thread; empty if not running.
    """

    function: str
    caller: str
    state: str
    age: float
    time_left: float | None = None
    thread: str = ""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Another worker of the group, and the session with it.

    Attributes:
        name: its name.
        id: its id.
        state: ``"connected"``: the session is open, ``"connecting"``, ``"not connected"`` (no call has connected yet),
            ``"lost"`` or ``"left"``.
        incarnation: the newest known process of that name; a later process has a higher number. 0: not known yet.
        epoch: number of the sessions with it, as references count them.
        transport: transport of the session, such as ``"shm"``; empty without one.
        connection: direction and address of the session, such as ``"to tcp:10.0.0.2:41023"``.
        why: why this transport: the first one that both offer, or why not a faster one.
        waiting: number of messages that wait for a connection.
        reason: why it is lost or has left, or why the last attempt to connect failed.
    """

    name: str
    id: int
    state: str
    incarnation: int = 0
    epoch: int = 0
    transport: str = ""
    connection: str = ""
    why: str = ""
    waiting: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """Connection of this worker.

    Attributes:
        peer: name of the worker at the other end; empty during the handshake.
        state: ``"open"`` or ``"handshake"``.
        where: direction and address.
        lanes: number of additional TCP connections.
        unprocessed: bytes of requests that the peer has not reported as started. It reports them with its next message,
            or once they are a share of ``request_window_bytes``; a small request may count until its reply.
        stalled: the peer has not read for a while.
    """

    peer: str
    state: str
    where: str
    lanes: int
    unprocessed: int
    stalled: bool


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """Member of the group, by the log of the group.

    Attributes:
        name: its name.
        id: its id.
        incarnation: its process.
        lease_age: seconds for which its lease has not changed; None if this worker does not observe it.
    """

    name: str
    id: int
    incarnation: int
    lease_age: float | None


@dataclass(frozen=True, slots=True)
class MembershipInfo:
    """Group of this worker, as this worker knows it.

    Attributes:
        epoch: number of the last entry of the group's log that this worker has read.
        members: the members, this worker included.
        lease: lifetime of leases in seconds (option ``member_lease``).
        renewed: seconds since this worker has renewed its lease.
    """

    epoch: int
    members: tuple[MemberInfo, ...]
    lease: float
    renewed: float


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
class LimitInfo:
    """Limit of what the worker keeps at the same time.

    Attributes:
        used: what is used now, by the peer that uses most if the limit is per peer; of ``max_objects``,
            ``max_header_bytes`` and ``max_message_bytes``, the most that a received message has had.
        limit: the limit; 0 for none.
        refused: how often a message, a connection, or more memory, was refused because of it. Of ``max_header_bytes``
            and ``max_message_bytes``, how many messages of this worker were over the limits of their receivers.
    """

    used: int
    limit: int
    refused: int = 0


@dataclass(frozen=True, slots=True)
class DebugInfo:
    """Snapshot of a worker; ``str()`` is a text for the terminal.

    Attributes:
        worker: name of the worker.
        id: its id.
        incarnation: distinguishes this process from earlier ones of the name.
        closed: it has left its group.
        counts: queues, calls and threads.
        calls: calls of this worker without a reply, oldest first.
        retries: calls that wait for their next attempt or its reply, see `telegrad.rpc.Retry`.
        requests: requests that it serves, oldest first.
        peers: the other workers of the group, and lost workers.
        connections: its connections.
        membership: the group; None once this worker has left it.
        references: its remote references; None if another thread holds their table for long.
        contexts: number of autograd contexts.
        kept_graphs: number of sent messages whose graph is kept, because a tensor of theirs lives at the receiver: for
            backward passes without a context.
        passes: number of backward passes in progress.
        bytes: memory of received messages.
        limits: what it keeps and may keep, by the name of the option that sets the limit. Two limits have no option:
            ``"interned_names"`` and ``"unacknowledged_bytes"``.
        threads: names of the threads of its pool.
        options: the options in force, without secrets.

    Example::

        info = rpc.debug_info()
        print(info.counts.queued_requests, info.requests)  # 0 ()
        print(info)  # all of it, for people
    """

    worker: str
    id: int
    incarnation: int
    closed: bool
    counts: CountsInfo
    calls: tuple[CallInfo, ...]
    retries: tuple[str, ...]
    requests: tuple[ServedRequestInfo, ...]
    peers: tuple[PeerInfo, ...]
    connections: tuple[ConnectionInfo, ...]
    membership: MembershipInfo | None
    references: ReferencesInfo | None
    contexts: int
    kept_graphs: int
    passes: int
    bytes: BytesInfo
    limits: dict[str, LimitInfo]
    threads: tuple[str, ...]
    options: dict[str, object]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        closed = ", closed" if self.closed else ""
        yield f"worker {self.worker} (id {self.id}, incarnation {self.incarnation}{closed})"
        yield f"  counts: {_facts(self.counts)}"
        yield from _part("calls without a reply", map(_call, self.calls))
        if self.retries:
            yield from _part("calls with a retry", self.retries)
        yield from _part("requests that it serves", map(_request, self.requests))
        yield from _part("peers", map(_peer, self.peers))
        yield from _part("connections", map(_connection, self.connections))
        yield from _membership(self.membership)
        references = "not readable: another thread holds their table"
        yield f"  references: {references if self.references is None else _facts(self.references)}"
        yield f"  autograd: {self.contexts} contexts, {self.passes} passes, {self.kept_graphs} graphs kept for peers"
        yield f"  bytes: {_facts(self.bytes)}"
        yield from _part("limits", (_limit(name, each) for name, each in self.limits.items()))
        yield f"  threads: {', '.join(self.threads) or 'none'}"
        yield f"  options: {', '.join(f'{name}={value!r}' for name, value in self.options.items())}"


def _part(title: str, lines: Iterable[str]) -> Iterator[str]:
    shown = list(lines)
    yield f"  {title}: {len(shown) or 'none'}"
    for line in shown[:_MOST_LINES]:
        yield f"    {line}"
    if len(shown) > _MOST_LINES:
        yield f"    and {len(shown) - _MOST_LINES} more"


def _facts(part: object) -> str:
    names: Iterable[str] = part.__dataclass_fields__  # type: ignore[attr-defined]
    return ", ".join(f"{name.replace('_', ' ')} {getattr(part, name)}" for name in names)


def _limit(name: str, each: LimitInfo) -> str:
    refused = f", refused {each.refused} times" if each.refused else ""
    return f"{name}: {each.used} of {each.limit or 'any number'}{refused}"


def _call(call: CallInfo) -> str:
    return f"{call.function} on {call.to}: {call.state}, {call.age:.1f} s"


def _request(request: ServedRequestInfo) -> str:
    left = "" if request.time_left is None else f", {request.time_left:.1f} s left"
    thread = f", on {request.thread}" if request.thread else ""
    return f"{request.function} from {request.caller}: {request.state} for {request.age:.1f} s{left}{thread}"


def _peer(peer: PeerInfo) -> str:
    state = peer.state if peer.state != "connected" else f"connected {peer.connection} ({peer.why})"
    waiting = f", {peer.waiting} messages wait" if peer.waiting else ""
    reason = f": {peer.reason}" if peer.reason else ""
    return f"{peer.name} (id {peer.id}, incarnation {peer.incarnation}, epoch {peer.epoch}) {state}{waiting}{reason}"


def _connection(connection: ConnectionInfo) -> str:
    lanes = f", {connection.lanes} lanes" if connection.lanes else ""
    stalled = ", the peer does not read" if connection.stalled else ""
    peer = connection.peer or "an unknown worker"
    unprocessed = f"{connection.unprocessed} bytes not reported as started by the peer"
    return f"{peer} {connection.where}: {connection.state}{lanes}, {unprocessed}{stalled}"


def _membership(group: MembershipInfo | None) -> Iterator[str]:
    if group is None:
        yield "  group: none"
        return
    renewed = f"this worker renewed its lease of {group.lease:g} s {group.renewed:.1f} s ago"
    yield from _part(f"group at epoch {group.epoch} ({renewed}), members", map(_member, group.members))


def _member(member: MemberInfo) -> str:
    lease = "" if member.lease_age is None else f", lease unchanged for {member.lease_age:.1f} s"
    return f"{member.name} (id {member.id}, incarnation {member.incarnation}){lease}"
