"""Telegrad's native core."""

from collections.abc import Callable, Sequence
from typing import Any, Final


class Block:
    """
    Received memory, 64-byte aligned and writable. It goes back to the pool (or to the peer that lent it) when the last object that uses it is gone.
    """

    def __len__(self) -> int: ...

class Lent:
    """
    Memory that a link has lent, 64-byte aligned and writable, for a tensor that is to go over it.
    """

class PoolThread:
    """A thread of the pool, for `Engine.next`; used by one thread only."""

    def __init__(self) -> None: ...

class Memory:
    """
    The memory that an engine hands out with messages. It outlives the engine.
    """

    def stats(self) -> dict[Any, Any]:
        """How much of it is in use, and how much is kept warm."""

def release() -> None:
    """
    Releases Python objects that engines no longer use. Every call of an engine does so; after the end of the last engine this function must.
    """

class Engine:
    """
    The native half of one worker: links, calls, threads' sleep. Times are in nanoseconds, a timeout of 0 is infinite.
    """

    def __init__(self, *, id: int, name: str, incarnation: int, group: str, secret: bytes, spin: int, handlers: int, window: int, pool_cache: int, handshake_timeout: int, connect_timeout: int, max_body: int, max_message: int, shared_memory: int, lanes: int, check_uid: bool) -> None: ...

    def listen(self, address: str) -> str:
        """Listens on an address; returns what peers connect to."""

    def set_peer(self, id: int, name: str, incarnation: int, addresses: Sequence[str]) -> None: ...

    def disconnect(self, id: int, why: str) -> None: ...

    def remove_peer(self, id: int, why: str) -> None: ...

    def call(self, peer: int, tag: int, flags: int, name_id: int, name: object | None, body: bytes, segments: object | None, timeout: int, nested: bool, keep_alive: object | None) -> tuple[Any, ...]:
        """
        Sends a request and waits. Returns (status, tag, flags, body, segments, peer, why).
        """

    def start(self, peer: int, tag: int, flags: int, name_id: int, name: object | None, body: bytes, segments: object | None, timeout: int, nested: bool, never_wait: bool, deferred: bool, target: object, keep_alive: object | None) -> int:
        """
        Sends a request; its completion goes to the pool with `target`, unless a thread waits for it. If `deferred`, it wakes no thread: without a polling thread it is processed up to 2 ms later. With the flag MUST_DELIVER, the request waits for a connection without limit. Returns the call's id; 0 if the engine has been stopped.
        """

    def wait(self, call: int, timeout: int) -> tuple[Any, ...] | None:
        """
        The outcome of a started call, or None: it went to the pool. Raises what a signal handler raises; an outcome that has come by then waits for the next call of this, which must follow.
        """

    def reply(self, connection: int, call: int, tag: int, flags: int, body: bytes, segments: object | None) -> None:
        """
        Answers a request. The segments' memory may change once this has returned; the list may be emptied.
        """

    def largest_body(self, connection: int) -> int:
        """
        How many bytes the body of a reply on a connection may have: more than that is left out.
        """

    def lend(self, peer: int, connection: int, size: int) -> object:
        """
        Returns memory for a tensor of `size` bytes that is sent to a peer: over a connection if that is
        the peer's (which may be -1), else over the link that requests go over. None if that has none.

        It is handed over as it is with a reply over that connection when nothing else holds it by then; otherwise
        it is copied.
        """

    def send(self, peer: int, tag: int, flags: int, body: bytes, segments: object | None) -> bool:
        """
        Sends a message that is never answered. False: the peer is known to be gone.
        """

    def next(self, thread: PoolThread) -> tuple[Any, ...] | None:
        """
        The next thing to do, by a pool thread: blocks; None when the engine has stopped.
        (0 request | 1 one-way, spawn, peer, connection, call, tag, flags, name, body, segments, deadline),
        (2 completion, spawn, target, completion), (3 event, spawn, event, peer, incarnation, text), (4 retire, spawn).
        """

    def spawn_failed(self) -> None:
        """The thread that an item asked for could not be started."""

    def request_callback(self, delay: int) -> None:
        """
        Asks for one event of kind 3 in the pool, after a while. Takes no lock: a finalizer may call it at any point.
        """

    def stop(self, timeout: int) -> None: ...

    def stats(self) -> dict[Any, Any]: ...

    @property
    def memory(self) -> Memory: ...

    def start_many(self, peers: list[int], tag: int, flags: int, name_id: int, name: object | None, body: bytes, segments: object | None, metadata: list[bytes] | None, timeout: int, nested: bool, never_wait: bool, futures: list[Any]) -> list[int]:
        """
        Sends the same request to several peers, each with metadata of its own if there are any: its last segment. As
        `start` for each of them, with its future as the target. The segments' memory may change once this has
        returned, and no peer waits for another one to take its request.
        """

class OtherReply:
    """A reply to messages of a backward pass that is no list of messages."""

    @property
    def outcome(self) -> object:
        """As `Engine.call` returns it."""

class Client:
    """
    Makes the calls of a worker.

    `to` is a worker's name, id or info. `receiver` is a reference on whose value the owner runs the
    call: `function` is then None for the value itself, the name of a method, or a function of the
    value; `introduce` says that the owner may not know the reference. Times are in nanoseconds.
    """

    def __init__(self, engine: object, codec: object, recorder: object, calls: object, environment: object) -> None: ...

    def call(self, to: object, function: object, args: object, kwargs: object, timeout: int, receiver: object = None, introduce: bool = False) -> Any:
        """Runs a function on a peer and waits for its value."""

    def start(self, to: object, function: object, args: object, kwargs: object, timeout: int, receiver: object = None, introduce: bool = False, internal: bool = False) -> Any:
        """Runs a function on a peer; the future of its value."""

    def create(self, to: object, function: object | None, args: object | None, kwargs: object | None, timeout: int, local_id: object, creation: object, receiver: object | None = None) -> None:
        """
        Runs a function on a peer, which keeps the result as the reference of this worker's that has the id.
        `creation` is called with the outcome after a while, by the pool or a thread that makes a call; its `_call`
        is set once the request is under way, also if a signal handler raises then.
        """

    def call_request(self, request: object) -> object:
        """Sends what Python has encoded, as `call`."""

    def start_request(self, request: object, target: object) -> None:
        """
        Sends what Python has encoded; the outcome is for a future, or what is called with it.
        """

    def wait(self, future: object, call: int, timeout: int) -> bool:
        """
        Waits for the outcome of a call, as `Engine.wait`, and completes its future. False: there is none.
        """

    def send_gradients(self, peer: int, messages: object, timeout: int, target: object) -> int:
        """
        Sends messages of a backward pass. The outcome is for `await_gradients`, or for `target`, which the pool calls with it if no thread takes it. The call's id; 0: the engine has been stopped; NOT_ENCODABLE: nothing has been sent.
        """

    def await_gradients(self, call: int, timeout: int) -> object:
        """
        Waits for the answer, as `Engine.wait`: messages, `OtherReply`, or None.
        """

    def complete_many(self, futures: list[Any], calls: list[Any], results: list[Any], notify_when_done: object) -> object:
        """
        Waits for calls that were begun and completes their futures, in this thread, as their outcomes come. A
        value that the codec decodes is put into the list of results. A future whose outcome another thread is
        processing is given to notify_when_done(future), which sees to it that `notify_wait_sets` is called. Returns
        the first future that failed; None: none did, though other threads may process some. False: another
        thread waits for one of them, and nothing has been done. Raises what a signal handler raises.
        """

    def notify_wait_sets(self) -> None:
        """
        A future is done whose outcome another thread processed when a thread began to collect.
        """

    def notify_context_ended(self, peer: int, value: object) -> bool:
        """
        Notifies a peer that an autograd context has ended. False: the codec cannot encode the value.
        """

    NOT_ENCODABLE: Final[int] = ...
    """(arg: object, /) -> int"""

class Request:
    """A request that is parked, for `Server.resume`."""

class Server:
    """
    Serves the requests that reach a worker, and completes its asynchronous calls, on pool threads.
    """

    def __init__(self, engine: object, codec: object, recorder: object, calls: object, handlers: object, environment: object, worker: object, scope_type: object, callback_scope: object) -> None: ...

    def record_all(self, on: bool) -> None:
        """Has Python record every request, for the profile of a server."""

    def reply(self, connection: int, call: int, messages: object) -> bool:
        """
        Answers messages of a backward pass with others. False: the codec cannot encode them.
        """

    def resume(self, request: Request) -> None:
        """Goes on with a request that was parked."""

    def next(self, thread: PoolThread, start_another: object) -> tuple[Any, ...] | None:
        """
        As `Engine.next`, but serves requests and completes asynchronous calls; (5 nothing, spawn) means: come
        again. Calls start_another() when the pool needs one more thread.

        What it raises is an error of Telegrad's own.
        """

class GraphWalk:
    """
    A walk of torch's graph from several sources, whose nodes and edges it keeps.
    """

    def __init__(self, kinds: dict[Any, Any], guard_type: object | None = None) -> None:
        """
        `kinds` has the kind of a node by its type: 0 for those that the walk goes on from, 1 for leaves, which
        several sources may share, 2 for other ends. `guard_type` is `telegrad.autograd.graph.deep_graph.RecursionGuard`.
        """

    def walk(self, edges: object) -> tuple[Any, ...]:
        """
        Walk from the next source. Each edge is a tuple that begins with a node, a leaf's tensor, or None.
        Return the leaves' tensors that it leads to; the other ends to which no earlier source has led; and of the
        leaves those to which an earlier source has led, each with the last such source, from 0.
        """

    @property
    def sources_meet(self) -> bool:
        """Whether two sources lead to a node that is no leaf."""

    @property
    def guard(self) -> object:
        """The guard of a large graph, or None."""

    @property
    def nodes(self) -> list[Any]:
        """All nodes by number; a leaf is its tensor."""

    @property
    def kinds(self) -> list[int]:
        """The kinds of all nodes by number."""

    def starts(self, source: int) -> list[int]:
        """Return the numbers of the nodes of a source's edges; -1 for None."""

    def below(self, number: int) -> list[int]:
        """
        Return the numbers of the nodes to which the edges of a node lead, in their order; -1 for None.
        """

    def order(self) -> list[int]:
        """
        Return the numbers of the nodes of kind 0, each before those that it leads to.
        """

class StepGate:
    def __init__(self, push_hooks: object, pop_hooks: object, max_wait: float) -> None: ...

    def handler(self, context: int, hooks: object | None = None) -> HandlerGuard: ...

    def body(self, context: int, hooks: object | None = None) -> BodyGuard: ...

    def step(self, context: int) -> StepGuard: ...

    @property
    def max_wait(self) -> float:
        """Seconds that a step waits for handlers inside."""

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

class StepGuard:
    def __enter__(self) -> StepGuard: ...

    def __exit__(self, *exception: object) -> None: ...

    @property
    def overtaken(self) -> int:
        """Handlers of other contexts that were inside when the step began."""

    @property
    def unread(self) -> bool:
        """Neither a handler nor the body of another context was inside."""

def shielded(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """
    A function of one argument for torch to call. If the interpreter ends while a daemon thread is in it, that
    thread stops for good: torch's frames around it do not survive the way in which Python ends the thread.
    """

class Buffer:
    """Memory of a received tensor."""

class CodecError(ValueError):
    """The bytes of a message are malformed."""

def tensor_dtypes() -> list[Any]:
    """
    The element types of tensors on the wire: (code, name of the torch dtype).
    """

def buffer_address(object: object) -> tuple[int, int]:
    """
    Return address and size in bytes of an object's contiguous buffer, valid while the buffer is exported.
    """

class Codec:
    """
    Encoder and decoder of plain values and CPU tensors: compact bytes and memory out of band.

    Codec-encodable are None, bool, int, float, complex, str, bytes, tuple, list, dict, dense CPU
    tensors and the registered types; subclasses are not.
    """

    def __init__(self, tensor_type: type, exchange_api: object | None, encode_tensor: object, decode_tensor: object, max_depth: int = 64, byte_types: tuple[Any, ...] = (), parameter_type: object | None = None, watch_cut: object | None = None, is_watched: object | None = None) -> None: ...

    def register(self, type: type, code: int, pack: object, unpack: object) -> None:
        """
        Encode objects of exactly `type` as the plain value pack(object), and decode them as unpack(value).

        pack runs once for each object, after the rest of the message has been encoded. Raises ValueError if the
        type or the code is taken.
        """

    def encode(self, object: object) -> tuple[bytes, list[tuple[int, int, object]]] | None:
        """
        Return body and segments (address, size in bytes, owner) of `object`, or None if it is not encodable.

        Also None if encoding would lose shared identity: a container met twice, tensors over the same memory.
        The memory of a segment must not be read after its owner is dropped. Errors of pack are passed on.
        """

    def encode_recorded(self, object: object) -> tuple[bytes, list[tuple[int, int, object]], list[object]] | None:
        """
        Encode like `encode`; also return the tensors that require grad, in the order of `decode`.

        Objects of exactly `parameter_type` that require grad are encoded as such tensors.
        """

    def decode(self, body: bytes | bytearray | memoryview, segments: Sequence[object], wrap: Callable[..., Sequence[object]] | None = None) -> object:
        """
        Return the object that was given to `encode`. Segments are writable buffers; tensors use their memory.

        With `wrap`, tensors that require grad are made without, and given to wrap as one list unless there are
        none. The tensors that wrap returns are used instead.

        Raises CodecError if body and segments are malformed; errors of unpack are passed on.
        """
