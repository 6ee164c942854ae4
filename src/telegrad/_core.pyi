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
    Releases Python objects that engines have done with. Every call of an engine does; after the end of the last one nobody would.
    """

class Engine:
    """
    The native half of one worker: links, calls, threads' sleep. Times are in nanoseconds, a time-out of 0 is infinite.
    """

    def __init__(self, *, id: int, name: str, incarnation: int, group: str, secret: bytes, spin: int, handlers: int, window: int, pool_cache: int, handshake_timeout: int, connect_timeout: int, max_body: int, max_message: int, shared_memory: int, lanes: int, check_uid: bool) -> None: ...

    def listen(self, address: str) -> str:
        """Listens on an address; returns what peers connect to."""

    def set_peer(self, id: int, name: str, incarnation: int, addresses: Sequence[str]) -> None: ...

    def part_from(self, id: int, why: str) -> None: ...

    def forget_peer(self, id: int, why: str) -> None: ...

    def call(self, peer: int, tag: int, flags: int, name_id: int, name: object | None, body: bytes, segments: object | None, timeout: int, nested: bool, linger: object | None) -> tuple[Any, ...]:
        """
        Sends a request and waits. Returns (status, tag, flags, body, segments, peer, why).
        """

    def start(self, peer: int, tag: int, flags: int, name_id: int, name: object | None, body: bytes, segments: object | None, timeout: int, nested: bool, never_wait: bool, lazy: bool, cookie: object, linger: object | None) -> int:
        """
        Sends a request; its outcome goes to the pool with `cookie`, unless somebody waits for it. If `lazy`, no thread is woken to look out for it: where none does so by itself, it comes up to 2 ms later; and if it must be sent (MAY_LINGER), it waits for a connection without end. Returns the call's id; 0 if the engine has been stopped.
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
        Memory, with a buffer, for a tensor of so many bytes that is to go to a peer: over a connection if that is
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
        (2 outcome, spawn, cookie, outcome), (3 event, spawn, event, peer, incarnation, text), (4 retire, spawn).
        """

    def not_spawned(self) -> None:
        """The thread that an item asked for could not be started."""

    def nudge(self, delay: int) -> None:
        """
        Asks for one event of kind 3 in the pool, after a while. Takes no lock: a finalizer may call it at any point.
        """

    def stop(self, linger: int) -> None: ...

    def stats(self) -> dict[Any, Any]: ...

    @property
    def memory(self) -> Memory: ...

    def start_many(self, peers: list[int], tag: int, flags: int, name_id: int, name: object | None, body: bytes, segments: object | None, preambles: list[bytes] | None, timeout: int, nested: bool, never_wait: bool, futures: list[Any]) -> list[int]:
        """
        Sends the same request to several peers, each with a preamble of its own if there are any: its last segment. As
        `start` for each of them, with its future as the cookie. The segments' memory may change once this has
        returned, and no peer waits for another one to take its request.
        """

class Unusual:
    """What `PlainCalls.call` returns when there is no plain value to return."""

    @property
    def outcome(self) -> object:
        """
        As `Engine.call` returns it; None: the call is not plain, and not made.
        """

class PlainCalls:
    """The short way for calls that carry only plain values."""

    def __init__(self, *, engine: object, codec: object, recorder: object, call: int, value: int, make: int, gradients: int, ended: int, may_linger: int, reply_flags: int, preamble: int, current: object, infos: dict[Any, Any], info_type: object, known: dict[Any, Any], by_value: set[Any], profiling: dict[Any, Any], is_grad_enabled: object, running_loop: object, future_type: object, no_devices: object) -> None: ...

    def call_directly(self, to: object | None, function: object | None, args: object | None, kwargs: object | None, timeout: int) -> object:
        """
        As `call`, of a call that the program makes outside of any request: the worker `to` is a name, an id or a
        WorkerInfo. `Unusual` without an outcome where Python must look.
        """

    def start_directly(self, calls: object, to: object | None, function: object | None, args: object | None, kwargs: object | None, timeout: object) -> object:
        """As `start`, likewise; the future, which it makes, or None."""

    def call(self, peer: int, flags: int, name_id: int, name: object, args: object, kwargs: object, timeout: int, nested: bool, context: object | None) -> object:
        """Runs a function on a peer and waits. Its value, or `Unusual`."""

    def start(self, peer: int, flags: int, name_id: int, name: object, args: object, kwargs: object, timeout: int, nested: bool, never_wait: bool, future: object, context: object | None) -> int:
        """
        Runs a function on a peer; what comes of it goes to the pool with `future`. The call's id; 0: the call is not plain, or the engine has been stopped, and it is not made.
        """

    def make(self, peer: int, name_id: int, name: object, args: object, kwargs: object, local_id: object, timeout: int, nested: bool, never_wait: bool, cookie: object) -> int:
        """
        Runs a function on a peer, which keeps the result as the reference of this worker's that has the id; that it does is told to `cookie`, which is called with the outcome after a while: by the pool, or by a thread that makes a call. Returns as `start` does, and sets the cookie's `_call`, also if a signal handler raises once the call is under way.
        """

    def make_directly(self, peer: int, function: object | None, args: object | None, kwargs: object | None, local_id: object, timeout: int, cookie: object) -> int:
        """
        As `make`, of a call that the program makes outside of any request. 0 where Python must look, too.
        """

    def ask(self, peer: int, messages: object, timeout: int, cookie: object) -> int:
        """
        Sends messages of a backward pass. The outcome is for `answer`, or for `cookie`, which the pool calls with it if nobody takes it. The call's id; 0: the engine has been stopped; NOT_PLAIN: nothing has been sent.
        """

    def answer(self, call: int, timeout: int) -> object:
        """Waits for the answer, as `Engine.wait`: messages, `Unusual`, or None."""

    def collect(self, futures: list[Any], calls: list[Any], results: list[Any], complete: object, end: object, tell_when_done: object) -> object:
        """
        Waits for calls that were begun and completes their futures, in this thread, as their outcomes come:
        complete(future, value) where that is plain, and the value is put into the list of results, else
        end(future, outcome, error), which returns whether it has failed. One that another thread has in hand is
        given to tell_when_done(future), which sees to it that `tell_collectors` is called. Returns the first that
        has failed; None: none has, though others may have some in hand. False: somebody else waits for one of
        them, and nothing has been done. Raises what a signal handler raises.
        """

    def tell_collectors(self) -> None:
        """
        A future is done that another thread had in hand when one began to collect.
        """

    def tell(self, peer: int, value: object) -> bool:
        """
        Sends a peer the word that an autograd context has ended. False: the value is not plain.
        """

    NOT_PLAIN: Final[int] = ...
    """(arg: object, /) -> int"""

class PlainPool:
    """
    What threads of the pool wait on. Does by itself what is plain: requests to run a function on
    plain values, and replies with a plain value to asynchronous calls.
    """

    def __init__(self, *, engine: object, codec: object, recorder: object, call: int, value: int, make: int, created: int, gradients: int, ended: int, may_linger: int, request_flags: int, reply_flags: int, preamble: int, worker: object, scope_type: object, current: object, callback_scope: object, resolver: object, clean_state: object, make_value: object, answer: object, complete: object, fail: object, on_gradients: object, on_ended: object, fetch: object, values: dict[Any, Any]) -> None: ...

    def reply(self, connection: int, call: int, messages: object) -> bool:
        """
        Answers messages of a backward pass with others. False: they are not plain, and nothing has been sent.
        """

    def open(self) -> None:
        """From now on requests may run here; until then all go to Python."""

    def close(self) -> None:
        """From now on all requests go to Python."""

    def next(self, thread: PoolThread) -> tuple[Any, ...] | None:
        """
        As `Engine.next`, but only what is not plain; (5 nothing, spawn) means: come again.

        What it raises is an error of Telegrad's own.
        """

class Reach:
    """What nodes of torch's graph lead to, from one source after the other."""

    def __init__(self, kinds: dict[Any, Any]) -> None:
        """
        `kinds` tells a node's kind by its type: 0 for those that the walk goes on from, 3 for those of them that
        run code of the program, 1 for leaves, which several sources may share, 2 for other ends.
        """

    def walk(self, starts: list[Any], source: int, descent: object | None = None) -> list[Any] | None:
        """
        The ends that these nodes lead to, and that this source has not come to yet, each with the last source
        that has, or None. None in place of the list: another source leads to one of the nodes; this
        object is of no more use then.
        """

    @property
    def inner(self) -> int:
        """How many nodes that are no ends it has come to."""

    @property
    def plain(self) -> int:
        """How many of those have kind 0, and lead on."""

def shielded(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """
    A function of one argument for torch to call. If the interpreter ends while a daemon thread is in it, that
    thread stops for good: torch's frames around it do not survive the way in which Python ends the thread.
    """

class Buffer:
    """The memory of a received tensor."""

class CodecError(ValueError):
    """The bytes of a message are not what the codec writes."""

def tensor_dtypes() -> list[Any]:
    """
    The element types that tensors may have on the wire: (code, name of the torch dtype).
    """

def buffer_address(object: object) -> tuple[int, int]:
    """
    Address and size in bytes of an object's contiguous buffer, good for as long as the buffer is exported.
    """

class Codec:
    """
    Turns plain values and CPU tensors into compact bytes and memory out of band, and back.

    Plain are None, bool, int, float, complex, str, bytes, tuple, list, dict, dense CPU tensors and
    the registered types, all of exactly that type.
    """

    def __init__(self, tensor_type: type, exchange_api: object | None, encode_tensor: object, decode_tensor: object, max_depth: int = 64, byte_types: tuple[Any, ...] = (), parameter_type: object | None = None, watch_cut: object | None = None, is_watched: object | None = None) -> None: ...

    def register(self, type: type, code: int, pack: object, unpack: object) -> None:
        """
        Objects of exactly `type` travel as pack(object), a plain value, and arrive as unpack(value).

        pack runs only when the rest of the message is known to be plain, once for each object. Raises ValueError
        if the type or the code is taken.
        """

    def encode(self, object: object) -> tuple[bytes, list[tuple[int, int, object]]] | None:
        """
        The body and the segments (address, size in bytes, owner) of `object`; None if it is not plain.

        Also None if plain bytes would lose what is shared: a container met twice, tensors over the same memory.
        The memory of a segment must not be read after its owner is dropped. What pack raises is passed on.
        """

    def encode_recorded(self, object: object) -> tuple[bytes, list[tuple[int, int, object]], list[object]] | None:
        """
        As `encode`, and the tensors in it that require grad, in the order in which `decode` wraps them.

        Objects of exactly `parameter_type` that require grad are encoded as such tensors.
        """

    def decode(self, body: bytes | bytearray | memoryview, segments: Sequence[object], wrap: Callable[..., Sequence[object]] | None = None) -> object:
        """
        What `encode` was given. Segments are writable buffers that become the memory of the tensors.

        With `wrap`, the tensors that require grad are made without, given to wrap all at once (if there are
        any), and what it returns stands in their place.

        Raises CodecError if body and segments are not what encode makes; what unpack raises is passed on.
        """
