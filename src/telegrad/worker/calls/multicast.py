"""Call to several workers, encoded once, with shared tensor memory."""

from asyncio import _get_running_loop
from collections.abc import Sequence
from itertools import starmap
from typing import Any

from telegrad.errors import NotInitialized, SerializationError
from telegrad.serialize.function_names import NotByName
from telegrad.serialize.tracebacks import is_of_signal_handler, strip_own_frames
from telegrad.wire import ANY_EPOCH
from telegrad.wire.ints import FLAG_INTERNAL, FLAG_METADATA, FLAG_MUST_DELIVER, TAG_CALL
from telegrad.worker.autograd_hooks import AutogradContext
from telegrad.worker.calls.client import Calls
from telegrad.worker.calls.encoded import PeerMetadata
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.interceptors import active
from telegrad.worker.scope import caller_flags, caller_state

__all__ = ["call_many"]


def call_many(
    calls: Calls,
    peers: Sequence[int],
    function: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    timeout: int,
    flags: int = 0,
) -> list[CallFuture[Any]]:
    """Call a function on several workers; return the futures in the same order.

    Args:
        calls: Calls of the calling worker.
        peers: Ids of the callees.
        function: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Timeout in ns; 0 for none.
        flags: Flags of the requests.

    Raises:
        SerializationError: An argument cannot be encoded.
        NotInitialized: The worker is closed.
    """
    futures: list[CallFuture[Any]] = []
    try:
        if active or len(peers) < 2:  # interceptors and single calls use the ordinary path
            _call_each(futures, calls, peers, function, args, kwargs, timeout, flags)
        else:
            _call_all(futures, calls, peers, function, args, kwargs, timeout, flags)
    except BaseException:  # raised by a signal handler, or nothing can be sent
        for future in futures:
            future._abandon()
        raise
    return futures


def _call_each(
    futures: list[CallFuture[Any]],
    calls: Calls,
    peers: Sequence[int],
    function: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    timeout: int,
    flags: int,
) -> None:
    """Call a function on several workers, encoded for each, and append the futures."""
    for peer in peers:
        call = (peer, function, args, kwargs, timeout, None, False, bool(flags & FLAG_INTERNAL))
        try:
            futures.extend(starmap(calls.client.start, (call,)))  # has the future before a signal handler can run
        except Exception as e:  # of an interceptor, or a reference cannot be sent to this peer
            if isinstance(e, SerializationError | NotInitialized) or is_of_signal_handler(e):
                raise
            future: CallFuture[Any] = CallFuture._of(calls, (peer, function, timeout))
            future._fail(strip_own_frames(e))
            futures.append(future)


def _call_all(
    futures: list[CallFuture[Any]],
    calls: Calls,
    peers: Sequence[int],
    function: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    timeout: int,
    flags: int,
) -> None:
    """Call a function on several workers, encoded once, and append the futures."""
    recorded_in, timeout, depth = calls.client.read_scope(timeout)
    context: AutogradContext | None = None if flags & FLAG_INTERNAL else recorded_in
    parts: tuple[str, ...] = ("args", "kwargs")
    body: tuple[object, ...] = (args, kwargs)
    number, text = 0, None
    try:
        number, text = calls.names.find(function)
    except NotByName:
        parts, body = ("the function", *parts), (function, *body)
    written = calls.messages.encode_shared(body, parts, context)
    autocast = caller_state()

    flags |= caller_flags() | written.flags
    with_metadata: list[tuple[int, CallFuture[Any], PeerMetadata]] = []  # peers with metadata of their own
    without_metadata: list[tuple[int, CallFuture[Any], None]] = []
    all_started = True
    try:
        for peer in peers:
            future: CallFuture[Any] = CallFuture._of(calls, (peer, function, timeout))
            futures.append(future)
            try:
                own = calls.messages.encode_for_peer(peer, written, autocast, context)
            except Exception as e:  # a reference cannot be sent to this peer
                if is_of_signal_handler(e):
                    raise
                future._fail(e)
            else:
                if own is None:
                    without_metadata.append((peer, future, None))
                else:
                    with_metadata.append((peer, future, own))
        for requests in (with_metadata, without_metadata):  # both are in use only if an autograd context has ended
            if not requests:
                continue
            to, awaited = [peer for peer, _, _ in requests], [future for _, future, _ in requests]
            metadata = [own.metadata for _, _, own in requests if own is not None]
            delivers = written.handles or context is not None
            extra = (FLAG_METADATA | FLAG_MUST_DELIVER if delivers else FLAG_METADATA) if metadata else 0
            epochs = [ANY_EPOCH if own is None else own.epoch for _, _, own in requests]
            all_started &= calls.engine.start_many(
                to, TAG_CALL, flags | extra, number, text, written.body, written.segments,
                metadata or None, epochs, timeout, depth,
                _get_running_loop() is not None, awaited,
            )  # fmt: skip
    except BaseException:  # raised by a signal handler, or the worker has been closed
        for peer, future, own in with_metadata:
            if not future._call_id():
                calls.messages.rollback(peer, own, request=True)
        raise
    if not all_started:
        raise NotInitialized
