"""State of a receiver, as its stream and its worker ask for it."""

import threading
from collections import deque
from collections.abc import Callable

from telegrad.errors import WorkerLost
from telegrad.streams.batches import WireBatch
from telegrad.streams.read_errors import again, is_expiry
from telegrad.worker import Worker
from telegrad.worker.calls.future import CallFuture

__all__ = ["ReceiverState"]


class ReceiverState:
    """Part of `Receiver` that changes nothing."""

    worker: Worker
    _number: int
    _ready: deque[WireBatch]

    # Defaults on the class: the first item does not wait for their assignment.
    failed: bool = False  # the reader has got the error
    wake: Callable[[], None] | None = None  # called after each arrival, for a task that waits
    is_async: bool = False  # a task reads it, so no thread polls for the replies
    _changed: threading.Condition | None = None  # of the lock, once a thread waits for an arrival
    _early: dict[int, WireBatch] | None = None  # batches that arrived before an earlier one, by their first item
    _arrived = 0  # items that arrived in order
    _taken = 0  # items of the batches that the reader has taken
    _current = 0  # of these, items of the last batch, which the reader may not have used yet
    _bytes = 0  # of the batches that are ready, and of the last one taken
    _current_bytes = 0
    _is_live = False  # the callee holds no items back
    _has_ended = False  # all items have arrived
    _has_seen_end = False  # the reader has
    _error: BaseException | None = None  # raised after the items that arrived
    _loss: WorkerLost | None = None  # the end of the session
    _is_closed = False
    _reader: object = None  # the thread or task that waits
    _is_opening = True  # no reply to the request that opens the stream has arrived
    _pulls = 0
    _may_hold = False  # the callee may hold items of the request in progress back
    _is_slow = False  # the reader has waited longer than `FLUSH_DELAY` since the last arrival
    _is_pulling = True  # a request is in progress, or about to be sent
    _pull: CallFuture[WireBatch] | None = None
    _flush: CallFuture[WireBatch | None] | None = None
    _flushing: int | None = None  # request that a flush in progress, or about to be sent, is about
    _flush_error: BaseException | None = None  # of a flush, which may have lost items

    def _has_news(self) -> bool:
        return bool(self._ready) or self._has_ended or self._is_closed or self._has_failed()

    @property
    def has_expired(self) -> bool:
        """Whether nothing has arrived but the error of the timeout."""
        return not (self._ready or self._has_ended or self._is_closed) and is_expiry(self._error)

    def _has_failed(self) -> bool:
        """Return whether the error is next: no flush may return items before it."""
        return self._error is not None and self._flushing is None

    @property
    def is_settled(self) -> bool:
        """Whether the callee needs no notification of the end."""
        return self._is_closed or self._has_ended or self._error is not None or self.worker.closed

    @property
    def state(self) -> str:
        """State of the stream, for its repr."""
        if self._is_closed:
            return "closed"
        return "at its end" if self.failed or self._has_seen_end else f"open, {self._taken} items read"

    def describe_end(self) -> str:
        """Return the text of the error of a reader that comes after the end; "" before it."""
        if not (self._is_closed or self.failed or self._has_seen_end):
            return ""
        return again(self, self._error if self.failed else None, self._taken, self._is_closed)

    @property
    def has_reader(self) -> bool:
        """Whether a thread or task waits for an item."""
        return self._reader is not None

    def idle_call(self) -> tuple[object, ...] | None:
        """Identify the request in progress; None without one, or if it is awaited."""
        pull = self._pull
        return ("pull", self._number, self._pulls) if pull and not pull.done() and self._reader is None else None
