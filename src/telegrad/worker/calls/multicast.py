"""The same call to several workers: what it says is written once, and on this host its tensors are stored once."""

from asyncio import _get_running_loop
from collections.abc import Sequence
from typing import Any

from telegrad.errors import NotInitialized
from telegrad.serialize.function_names import NotByName
from telegrad.wire import Flag, Tag
from telegrad.worker.calls.client import Calls
from telegrad.worker.calls.future import NO_DEVICES, CallFuture
from telegrad.worker.calls.interceptors import active
from telegrad.worker.calls.messages import PeerMetadata
from telegrad.worker.scope import caller_flags, caller_state, current, remaining

__all__ = ["call_many"]

_CALL, _INTERNAL = int(Tag.CALL), int(Flag.INTERNAL)
_METADATA, _MUST_DELIVER = int(Flag.METADATA), int(Flag.MUST_DELIVER)


def call_many(
    calls: Calls,
    peers: Sequence[int],
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: int,
    flags: int = 0,
) -> list[CallFuture[Any]]:
    """Runs a function on several workers; the futures of its values, in the order of the workers.

    Args:
        calls: of the worker that calls.
        timeout: ns; 0 is none.
        flags: of the requests.

    Raises:
        SerializationError: an argument cannot travel.
        NotInitialized: the worker is closed.
    """
    if active or len(peers) < 2:  # each goes by itself
        start = calls.client.start
        return [start(peer, function, args, kwargs, timeout, None, False, bool(flags & _INTERNAL)) for peer in peers]
    scope = current.get()
    context = None if scope is None or flags & _INTERNAL else scope.autograd
    timeout = remaining(timeout, scope)
    parts: tuple[str, ...] = ("args", "kwargs")
    body: tuple[Any, ...] = (args, kwargs)
    number, text = 0, None
    try:
        number, text = calls.names.find(function)
    except NotByName:
        parts, body = ("the function", *parts), (function, *body)
    written = calls.messages.encode_shared(body, parts, context)
    autocast = caller_state()

    flags |= caller_flags() | written.flags
    futures: list[CallFuture[Any]] = []
    spoken_to: list[tuple[int, CallFuture[Any], PeerMetadata]] = []  # alone, besides
    others: list[tuple[int, CallFuture[Any], None]] = []
    try:
        for peer in peers:
            future: CallFuture[Any] = CallFuture(NO_DEVICES)
            future._calls = calls
            future._request = (peer, function, timeout)
            futures.append(future)
            try:
                alone = calls.messages.encode_for_peer(peer, written, autocast, context)
            except Exception as e:  # a reference cannot travel there
                future.set_exception(e)
            else:
                if alone is None:
                    others.append((peer, future, None))
                else:
                    spoken_to.append((peer, future, alone))
    except BaseException:  # a signal handler's: none of them leaves
        for peer, _, alone in spoken_to:
            calls.messages.rollback(peer, alone)
        raise
    for requests in (spoken_to, others):  # one of them is empty, unless an autograd context has ended meanwhile
        if not requests:
            continue
        to, theirs = [peer for peer, _, _ in requests], [future for _, future, _ in requests]
        metadata = [alone.metadata for _, _, alone in requests if alone is not None]
        said = (_METADATA | _MUST_DELIVER if written.handles or context is not None else _METADATA) if metadata else 0
        ids = calls.engine.start_many(
            to, _CALL, flags | said, number, text, written.body, written.segments,
            metadata or None, timeout, scope is not None and scope.nested,
            _get_running_loop() is not None, theirs,
        )  # fmt: skip
        for future, call in zip(theirs, ids, strict=True):
            future._call = call
        if not all(ids):
            raise NotInitialized
    return futures
