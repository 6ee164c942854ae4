"""Telegrad's native core."""

from collections.abc import Callable, Sequence
import types
from typing import Any, Final


class Block:
    """
    Received memory, 64-byte aligned and writable.

    Its last user returns it to the buffer pool, or to the peer that leased it.
    """

    def __len__(self) -> int: ...

class LeasedBuffer:
    """
    Memory leased from a link for a tensor to be sent over it.

    64-byte aligned and writable.
    """

class CallSnapshot:
    """A call of this worker without a reply."""

    @property
    def id(self) -> int: ...

    @property
    def peer(self) -> int: ...

    @property
    def name_id(self) -> int:
        """Number of the function's name; 0 for none."""

    @property
    def connection(self) -> int:
        """The connection that has the request; 0 while it waits."""

    @property
    def since(self) -> int:
        """Monotonic time of the call in ns."""

class RequestSnapshot:
    """A request of a peer without a reply."""

    @property
    def connection(self) -> int: ...

    @property
    def call(self) -> int: ...

    @property
    def peer(self) -> int: ...

    @property
    def state(self) -> str:
        """queued, running, parked or deferred."""

    @property
    def since(self) -> int:
        """When it was queued, or when a thread took it, in monotonic ns."""

    @property
    def deadline(self) -> int:
        """Of a queued request, in monotonic ns; 0 for none."""

    @property
    def name(self) -> bytes:
        """The function's name as sent, if the request is queued or parked."""

class PeerSnapshot:
    """A peer and the session with it."""

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int:
        """The newest that is known."""

    @property
    def connection(self) -> int:
        """The connection that carries the session; 0 if none is open."""

    @property
    def epoch(self) -> int:
        """Epoch of the messages that are made now."""

    @property
    def connecting(self) -> bool: ...

    @property
    def pending(self) -> int:
        """Number of messages that wait for a connection."""

    @property
    def last_error(self) -> str:
        """Of the last attempt to connect, or why the peer was removed."""

class ConnectionSnapshot:
    """A connection, open or in its handshake."""

    @property
    def id(self) -> int: ...

    @property
    def peer(self) -> int:
        """Id of the peer; -1 if not known yet."""

    @property
    def open(self) -> bool: ...

    @property
    def initiator(self) -> bool:
        """This worker has connected."""

    @property
    def stalled(self) -> bool:
        """The peer has not read for a while."""

    @property
    def address(self) -> str: ...

    @property
    def source(self) -> str:
        """Source of an accepted connection."""

    @property
    def lanes(self) -> int: ...

    @property
    def unprocessed(self) -> int:
        """Bytes of requests that the peer has not started to process."""

class LimitSnapshot:
    """A limit of what the worker keeps at the same time."""

    @property
    def option(self) -> str:
        """Name of the option that sets it."""

    @property
    def used(self) -> int:
        """Of the peer that uses most, if the limit is per peer."""

    @property
    def limit(self) -> int: ...

    @property
    def refused(self) -> int:
        """How often a message, or more memory, was refused."""

class Snapshot:
    """Calls, requests, sessions and connections of an engine at one moment."""

    @property
    def at(self) -> int:
        """Monotonic time in ns."""

    @property
    def calls(self) -> list[CallSnapshot]: ...

    @property
    def requests(self) -> list[RequestSnapshot]: ...

    @property
    def peers(self) -> list[PeerSnapshot]: ...

    @property
    def connections(self) -> list[ConnectionSnapshot]: ...

    @property
    def limits(self) -> list[LimitSnapshot]: ...

class AppliedFault:
    """A rule applied to a message."""

    @property
    def rule(self) -> int:
        """The id of the rule."""

    @property
    def destination(self) -> str:
        """Name of the peer; "" if not known yet."""

    @property
    def type(self) -> int:
        """FrameType of the message."""

    @property
    def tag(self) -> int: ...

    @property
    def nth(self) -> int:
        """Number of the message among those that the rule is about."""

    @property
    def link(self) -> str:
        """Description of the connection."""

class Faults:
    """Rules of faults of one worker; times are in nanoseconds."""

    def __init__(self, source: str, seed: int) -> None: ...

    def add(self, *, id: int, action: int, destination: str, types: int, tag: int, without: int, nth: int, count: int, probability: float, delay: int, body: bool) -> None: ...

    def remove(self, id: int) -> bool:
        """Remove a rule; return whether it was there."""

    def clear(self) -> None:
        """Remove all rules."""

    def release(self) -> None:
        """Release the messages that rules hold back now."""

    def applied(self) -> list[AppliedFault]:
        """Return what the rules have done, in order."""

    def wait(self, count: int, timeout: int) -> bool:
        """
        Wait until `count` faults have been applied.

        Returns False after the timeout.
        """

class PoolThread:
    """State of one pool thread in `Engine.next`."""

    def __init__(self) -> None: ...

class Memory:
    """Memory of received messages. It outlives the engine."""

    def stats(self) -> dict[Any, Any]:
        """Return the counts and bytes of blocks in use and in the cache."""

def openssl_version() -> str:
    """Return the version of OpenSSL in use; "" for a build without it."""

def release() -> None:
    """
    Release Python objects that engines no longer use.

    Every call of an engine does so; needed after the end of the last engine.
    """

class Engine:
    """
    The native part of one worker: connections, calls, queues.

    Times are in nanoseconds; a timeout of 0 is infinite.
    """

    def __init__(self, *, id: int, name: str, incarnation: int, group: str, secret: bytes, spin: int, handlers: int, window: int, pool_cache: int, handshake_timeout: int, connect_timeout: int, heartbeat: int, local_heartbeat: int, max_body: int, max_message: int, shared_memory: int, lanes: int, max_call_depth: int, max_in_flight: int, max_in_flight_bytes: int, send_queue: int, max_waiting: int, arena_budget: int, max_peers: int, max_unauthenticated: int, resume: bool, check_uid: bool, secret_given: bool, encrypted: bool, certificate: str, private_key: str, authority: str, faults: Faults | None) -> None: ...

    def listen(self, address: str) -> str:
        """Listen on an address and return the address that peers connect to."""

    def set_peer(self, id: int, name: str, incarnation: int, addresses: Sequence[str]) -> None: ...

    def acknowledge(self, id: int) -> None:
        """
        Report that an event of a session with the peer has been processed.

        The next session with the peer opens after all of them.
        """

    def set_epoch(self, id: int, epoch: int) -> None:
        """
        Set the epoch of the messages to the peer that may still be sent.

        Messages of an earlier epoch belong to an ended session, and are not sent.
        """

    def is_open(self, connection: int) -> bool:
        """Return whether the session of a connection has not ended."""

    def disconnect(self, id: int, why: str, incarnation: int) -> None: ...

    def remove_peer(self, id: int, why: str, incarnation: int) -> None: ...

    def call(self, peer: int, tag: int, flags: int, name_id: int, name: object | None, body: bytes, segments: object | None, timeout: int, nested: bool, keep_alive: object | None) -> tuple[Any, ...]:
        """
        Send a request and wait.

        Returns the completion, see `telegrad.wire.CompletionField`.
        """

    def reply(self, connection: int, call: int, tag: int, flags: int, body: bytes, segments: object | None) -> bool:
        """
        Reply to a request. False: its session has ended.

        The segments' memory may change once this has returned; the list may be emptied.
        """

    def detach(self, connection: int, call: int, deferred: bool) -> bool:
        """
        Record that no thread runs a request, and return whether it has been canceled.

        If it is canceled later, the pool gets a work item of the kind CANCEL.
        """

    def parked(self) -> int:
        """Return the number of requests that wait for their inputs."""

    def is_canceled(self, connection: int, call: int) -> bool:
        """Return whether a request that has no reply yet has been canceled."""

    def mark_late(self, connection: int, call: int) -> None:
        """
        Record that the handler of a request has seen that its deadline has passed.

        The call times out, whatever the reply to the request is.
        """

    def largest_body(self, connection: int) -> int:
        """
        Return the size limit in bytes of a reply's body; a larger body is left out.
        """

    def lend(self, peer: int, connection: int, size: int) -> object:
        """
        Lease memory for a tensor of `size` bytes that will be sent to a peer.

        Returns None if the link leases none. The link is that of `connection` if it belongs to the peer (`peer`
        may then be -1), else the link of requests.

        A reply over this connection transfers it without a copy if no other code holds it by then.
        """

    def send(self, peer: int, tag: int, flags: int, body: bytes, segments: object | None, epoch: int = -1) -> bool:
        """
        Send a one-way message. False: it is not sent.

        The peer is known to have left, or the epoch has ended.
        """

    def next(self, thread: PoolThread) -> tuple[Any, ...] | None:
        """
        Block until a work item is ready for this pool thread, and return it.

        Returns None when the engine has stopped.

        `telegrad.wire.WorkKind` has the kinds of items, `MessageItemField` and the other tables their fields.
        """

    def spawn_failed(self) -> None:
        """
        Report that the thread that a work item asked for could not be started.
        """

    def request_callback(self, delay: int) -> None:
        """
        Request one event of the kind CALLBACK in the pool after `delay`.

        Takes no lock, so finalizers may call it.
        """

    def stop(self, timeout: int) -> None: ...

    def stats(self) -> dict[Any, Any]: ...

    def snapshot(self) -> tuple[Snapshot, dict[int, object]]:
        """
        Return what the engine is doing, and the targets of asynchronous calls.

        Copies under the mutex: for a worker that hangs, not for each call.
        """

    def find_request(self, connection: int, call: int) -> RequestSnapshot | None:
        """
        Return a request that has begun and has no reply; None if there is none.
        """

    @property
    def memory(self) -> Memory: ...

    def start_many(self, peers: list[int], tag: int, flags: int, name_id: int, name: object | None, body: bytes, segments: object | None, metadata: list[bytes] | None, epochs: list[int], timeout: int, depth: int, never_wait: bool, futures: list[Any]) -> bool:
        """
        Send one request to several peers, like `start`.

        The target of each is its future. Each request that is under way has set the `_call` of its future, even if a
        signal handler raises meanwhile. If there is metadata, a peer's own is its last segment. The segments'
        memory may change once this has returned, and no peer waits for another. Returns False if the engine has
        been stopped: some calls get no completion.
        """

class OtherReply:
    """Reply to messages of a backward pass that is no list of messages."""

    @property
    def completion(self) -> object:
        """Completion of the call, see `telegrad.wire.CompletionField`."""

class Client:
    """
    The calling side of a worker.

    `to` is a worker's name, id or info. `receiver` is a reference on whose value the owner runs the call:
    `function` is then None for the value itself, the name of a method, or a function of the value;
    `introduce` means that the owner may not know the reference yet. Times are in nanoseconds.
    """

    def __init__(self, engine: object, codec: object, hooks: object, calls: object, environment: object) -> None: ...

    def call(self, to: object, function: object, args: object, kwargs: object, timeout: int, receiver: object = None, introduce: bool = False) -> Any:
        """Run a function on a peer and wait for its value."""

    def start(self, to: object, function: object, args: object, kwargs: object, timeout: int, receiver: object = None, introduce: bool = False, internal: bool = False, polled: bool = False) -> Any:
        """
        Start a function on a peer and return the future of its value.

        `polled`: this thread will soon wait for the future, so no other thread is woken for the reply at once.
        """

    def create(self, to: object, function: object | None, args: object | None, kwargs: object | None, timeout: int, local_id: object, creation: object, receiver: object | None = None) -> None:
        """
        Start a function on a peer, which keeps the result.

        The result is this worker's reference with the id `local_id`. A pool thread, or a thread that makes a
        call, later calls `creation` with the completion. Its `_call` is set once the request is under way, even
        if a signal handler raises meanwhile.
        """

    def call_request(self, request: object) -> object:
        """
        Send a request that Python has encoded and wait for its value, like `call`.
        """

    def start_request(self, request: object, target: object) -> None:
        """
        Send a request that Python has encoded.

        `target` is a future, or is called with the completion.
        """

    def wait(self, future: object, call: int, timeout: int) -> bool:
        """
        Wait for the completion of a call and complete its future.

        Returns False if the completion went to the pool. If it raises, for a signal handler, call it again.
        """

    def cancel(self, call: int) -> bool:
        """
        Cancel a started call and complete its future.

        If another thread waits for the call, that thread completes the future. Returns False if the call has ended or its deadline has passed.
        """

    def expire(self, call: int) -> None:
        """
        End a pending call soon, as if its deadline had just passed.

        Its error says how far the call had come.
        """

    def send_gradients(self, peer: int, messages: object, timeout: int, target: object, encoded: object | None = None) -> int:
        """
        Send messages of a backward pass and return the call's id.

        `encoded`: the messages as an `Encoded`, if Python has encoded them.
        The completion goes to `await_gradients`, or to `target`, which the pool calls if no thread waits.
        Returns 0 if the engine has been stopped, NOT_ENCODABLE if nothing has been sent.
        """

    def await_gradients(self, call: int, timeout: int) -> object:
        """
        Wait for the reply, like `wait`.

        Returns messages, an `OtherReply`, or None if the completion went to the pool.
        """

    def complete_many(self, futures: list[Any], calls: list[Any], results: list[Any], notify_when_done: object) -> object:
        """
        Wait for started calls and complete their futures in this thread.

        A value that the codec decodes is also stored in `results`. If another thread is processing the
        completion of a future, notify_when_done(future) is called, which has to cause a call of
        `notify_wait_sets`. Returns the first future that failed; None if none did, though other threads may
        still process some; False, without waiting, if another thread waits for one of them. Raises the
        exception of a signal handler.
        """

    def read_scope(self, timeout: int) -> tuple[Any, int, int]:
        """
        Return autograd context, timeout within the scope, and depth of a call.
        """

    def notify_wait_sets(self) -> None:
        """
        Notify threads in `complete_many` that another thread has completed a future.
        """

    def notify_context_ended(self, peer: int, value: object, epoch: int = -1) -> bool:
        """
        Notify a peer that an autograd context has ended.

        It is not sent if its epoch has ended. Returns False if the codec cannot encode the value.
        """

    NOT_ENCODABLE: Final[int] = ...
    """(arg: object, /) -> int"""

class Request:
    """Parked request, for `Server.resume`."""

class Server:
    """
    The serving side of a worker: serves requests, completes asynchronous calls.
    """

    def __init__(self, engine: object, codec: object, hooks: object, calls: object, handlers: object, environment: object, worker: object, scope_type: object, callback_scope: object) -> None: ...

    def record_all(self, on: bool) -> None:
        """Have Python prepare every request, for profiles or interceptors."""

    def reply(self, connection: int, call: int, messages: object) -> bool:
        """
        Reply to messages of a backward pass with messages.

        Returns False if the codec cannot encode them.
        """

    def resume(self, request: Request) -> None:
        """Resume a request that was parked."""

    def next(self, thread: PoolThread, start_another: object) -> tuple[Any, ...] | None:
        """
        Process work items until there is one for Python; return it like `Engine.next`.

        The kind NO_WORK means: call again. Calls start_another() when the pool needs one more thread. An
        exception is an internal error of Telegrad.
        """

class GraphWalk:
    """
    Traversal of torch's autograd graph from several sources; keeps its nodes.
    """

    def __init__(self, kinds: dict[Any, Any], guard_type: object | None = None) -> None:
        """
        Create a walk without sources.

        `kinds` maps the type of a node to its kind: 0 for inner nodes, below which the walk continues, 1 for
        leaves, which several sources may share, 2 for other ends. `guard_type` is
        `telegrad.autograd.graph.deep_graph.RecursionGuard`.
        """

    def walk(self, edges: object) -> tuple[Any, ...]:
        """
        Walk from the next source.

        Each edge is a tuple that begins with a node, or a leaf's tensor, or None. Return the tensors of the leaves below it; the recv nodes below it that no earlier source reached; and
        (tensor, index of the last such source) for each leaf that an earlier source reached.
        """

    @property
    def sources_meet(self) -> bool:
        """Whether two sources lead to a node that is no leaf."""

    @property
    def guard(self) -> object:
        """Guard against deep recursion in a large graph, or None."""

    @property
    def nodes(self) -> list[Any]:
        """List of nodes by number, with the tensor instead of a leaf's node."""

    @property
    def kinds(self) -> list[int]:
        """List of the nodes' kinds by number."""

    def starts(self, source: int) -> list[int]:
        """Return the numbers of the nodes of a source's edges; -1 for None."""

    def below(self, number: int) -> list[int]:
        """
        Return the numbers of the nodes to which a node's edges lead; -1 for None.
        """

    def order(self) -> list[int]:
        """
        Return the numbers of the nodes of kind 0, each before those that it leads to.
        """

class StepGate:
    """
    Lock between steps of optimizers and handlers that read their parameters.
    """

    def __init__(self, push_hooks: object, pop_hooks: object, max_wait: float) -> None: ...

    def handler(self, context: int, hooks: object | None = None) -> HandlerGuard: ...

    def body(self, context: int, hooks: object | None = None) -> BodyGuard: ...

    def step(self, context: int) -> StepGuard: ...

    def blocked(self, context: int) -> WaitGuard:
        """
        Mark code that waits for another step: no step waits for its handler meanwhile.
        """

    @property
    def max_wait(self) -> float:
        """Limit in seconds of a step's wait for handlers."""

    @max_wait.setter
    def max_wait(self, arg: float, /) -> None: ...

    @property
    def handlers(self) -> int: ...

    @property
    def bodies(self) -> int: ...

    @property
    def queued(self) -> int: ...

    @property
    def waiting(self) -> list[int]: ...

class HandlerGuard:
    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...

class BodyGuard:
    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...

class WaitGuard:
    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...

class StepGuard:
    def __enter__(self) -> StepGuard: ...

    def __exit__(self, *exception: object) -> None: ...

    @property
    def overtaken(self) -> int:
        """
        Number of handlers of other contexts that had not left when the step began.
        """

    @property
    def unread(self) -> bool:
        """
        Whether no handler or body of another context was inside when the step began.
        """

def shielded(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """
    Wrap a function of one argument that torch calls.

    If the interpreter finalizes while a daemon thread runs it, that thread blocks forever: torch's C++
    frames would not survive that Python unwinds the thread's stack.
    """

def thread_frames() -> dict[int, types.FrameType]:
    """
    Return the innermost frame of each thread, by the thread's identifier.

    Safe while the threads run, unlike `sys._current_frames` and `f_back` on Python 3.11. The frames keep the
    arguments of their functions alive.
    """

class Buffer:
    """Memory of a received tensor."""

class CodecError(ValueError):
    """The bytes of a message are malformed."""

def tensor_dtypes() -> list[Any]:
    """
    Return the tensor element types on the wire: (code, name of the torch dtype).
    """

def buffer_address(object: object) -> tuple[int, int]:
    """
    Return address and size in bytes of an object's contiguous buffer.

    Valid while the buffer is exported.
    """

class Codec:
    """
    Encoder and decoder of plain values and CPU tensors.

    The result is compact bytes and memory out of band. Codec-encodable are None, bool, int, float, complex,
    str, bytes, tuple, list, dict, dense CPU tensors and the registered types; subclasses are not.
    """

    def __init__(self, tensor_type: type, exchange_api: object | None, encode_tensor: object, decode_tensor: object, max_depth: int = 64, byte_types: tuple[Any, ...] = (), parameter_type: object | None = None, watch_cut: object | None = None, is_watched: object | None = None, max_objects: int = 33554432, too_many: object | None = None, forward_ad: object | None = None) -> None: ...

    @property
    def max_objects(self) -> int:
        """The most objects of a decoded value, in units of 64 bytes."""

    @property
    def refused(self) -> int:
        """How many values had too many objects."""

    @property
    def most_objects(self) -> int:
        """The most objects that a decoded value has had."""

    def register(self, type: type, code: int, pack: object, unpack: object) -> None:
        """
        Register functions that encode and decode objects of exactly `type`.

        They are encoded as the plain value pack(object), and decoded as unpack(value). pack runs once for each
        object, after the rest of the message has been encoded. Raises ValueError if the type or the code is
        taken.
        """

    def encode(self, object: object) -> tuple[bytes, list[tuple[int, int, object]]] | None:
        """
        Return body and segments of `object`, or None if it is not encodable.

        A segment is (address, size in bytes, owner). Also None if encoding would lose shared identity: a
        container met twice, tensors over the same memory. The memory of a segment must not be read after its
        owner is dropped. Errors of pack are passed on.
        """

    def encode_recorded(self, object: object) -> tuple[bytes, list[tuple[int, int, object]], list[object]] | None:
        """
        Encode like `encode`; also return the tensors that require grad.

        They are in the order of `decode`. Objects of exactly `parameter_type` that require grad are encoded as
        such tensors.
        """

    def decode(self, body: bytes | bytearray | memoryview, segments: Sequence[object], wrap: Callable[..., Sequence[object]] | None = None) -> object:
        """
        Return the object that was given to `encode`.

        Segments are writable buffers; tensors use their memory.

        With `wrap`, tensors that require grad are created without it and passed to wrap(list) in one list,
        unless there are none; the tensors that it returns are used instead.

        Raises CodecError if body and segments are malformed; errors of unpack are passed on.
        """
