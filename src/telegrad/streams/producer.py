"""Callee's side of a stream whose items a synchronous iterator produces.

The iterator runs in the thread that serves a request for items, and stops when that request has its batch. So a stream
that is not read holds no thread, and its generator does not run.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextvars import Context, copy_context
from typing import Any, Final, Protocol

from telegrad.serialize.tracebacks import show_exception, traceback_of
from telegrad.streams.batches import CLOSED, ENDED, OPEN, SOLITARY, WireBatch, copy_item, size_of
from telegrad.worker.scope import Scope, caller_flags, caller_state, not_needed
from telegrad.worker.serving.torch_state import CoroutineTorchState

__all__ = ["BATCH_TIME", "Ended", "Producer", "log_close_error"]

remote_logger: logging.Logger = logging.getLogger("telegrad.remote")

BATCH_TIME: Final = 200_000
"""Time in ns after which a batch with at least one item is complete."""


class Ended(Protocol):
    """Function that is called once, when a stream of this callee has ended."""

    def __call__(self, producer: Any, /) -> object: ...


def log_close_error(scope: Scope, label: str, error: BaseException) -> None:
    """Log an exception that the end of a generator raised, which no caller gets."""
    remote_logger.log(
        scope.worker.options.remote_error_number(),
        "closing the stream of %s raised %s\n%s",
        label,
        show_exception(error),
        traceback_of(error),
    )


class Producer:
    """Iterator of one stream.

    Args:
        key: The caller's id, and its number for the stream.
        iterator: Produces the items.
        label: Name of the function that returned the iterator.
        scope: Scope of the request that opened the stream.
        ended: Removes the stream from the table of this worker.
    """

    # Defaults on the class: the first item does not wait for their assignment.
    _next = 0  # number of the first item of the batch
    _solitary: list[Any] | None = None  # the item that the next batch consists of
    _error: BaseException | None = None  # for the next request
    _is_exhausted = False
    _is_closing = False
    _is_urgent = False  # the batch is complete with its next item
    _runs = 0
    _is_running = False

    def __init__(
        self, key: tuple[int, int], iterator: Iterator[object], label: str, scope: Scope, ended: Ended
    ) -> None:
        self.key: tuple[int, int] = key
        self._iterator = iterator
        self._label = label
        self._scope = scope
        self._ended = ended
        self._context: Context = copy_context()  # of every step: with the scope of the request
        self._state = CoroutineTorchState(caller_flags(), caller_state(), scope)
        self._lock = threading.Lock()
        self._items: list[Any] = []  # the batch
        self._context.run(not_needed.set, self._was_closed)

    def current_run(self) -> tuple[object, ...] | None:
        """Return a value that identifies the run in progress; None if there is none."""
        return ("step", *self.key, self._runs) if self._is_running else None

    # ---- requests of the caller

    def pull(self, credit: int) -> WireBatch:
        """Run the iterator and return its next items.

        Args:
            credit: Most items to produce.

        Raises:
            Exception: Whatever the iterator raises, once all earlier items have been returned.
        """
        with self._lock:
            if self._is_closing:
                return self._next, CLOSED, 0, []
            self._is_running = True
            self._runs += 1
        try:
            if self._solitary is None and self._error is None:
                self._context.run(self._produce, credit)
        finally:
            with self._lock:
                self._is_running = self._is_urgent = False
                first, items = self._take()
                size = 0
                if not items and self._solitary is not None:
                    items, self._solitary = self._solitary, None
                    size = size_of(items[0])
                    self._next += 1
                must_close = self._was_closed()  # meanwhile
        if must_close:
            self._ended(self)
            self._close_iterator()
        if self._is_exhausted or (self._error is not None and not items):
            self._ended(self)
            error, self._error = self._error, None
            if error is not None:
                raise error
        return first, ENDED if self._is_exhausted else CLOSED if must_close else OPEN, size, items

    def flush(self) -> WireBatch:
        """Return the items that a running request holds back.

        If there are none, that request, or the next one if none runs yet, returns its next item at once. A solitary
        item belongs to the next `pull`: its encoding may fail, and that ends the stream after the items before it.
        """
        with self._lock:
            self._is_urgent = True  # before reading the items, which a step may add without the lock
            if self._items:
                self._is_urgent = False
            first, items = self._take()
        return first, OPEN, 0, items

    def _was_closed(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Close the iterator, or have its running step do so when it returns."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            if self._is_running:
                return
        self._ended(self)
        self._close_iterator()

    # ---- steps

    def _produce(self, credit: int) -> None:
        """Run the iterator until the batch is complete."""
        step, append, now = self._iterator.__next__, self._items.append, time.monotonic_ns
        until = now() + BATCH_TIME
        with self._state:
            while not self._is_closing:
                try:
                    item = step()
                except StopIteration:
                    self._is_exhausted = True
                    return
                except BaseException as e:  # SystemExit too: the caller gets it
                    self._error = e
                    return
                if type(item) is not int:  # `copy_item` at once for the most frequent items
                    copied = copy_item(item)
                    if copied is SOLITARY:
                        self._solitary = [item]
                        return
                    item = copied
                credit -= 1
                append(item)
                if credit <= 0 or self._is_urgent or now() > until:
                    return

    def _take(self) -> tuple[int, list[Any]]:
        """Return the number of the first small item that is ready, and these items.

        The caller holds the lock; a running step may add items meanwhile.
        """
        first = self._next
        items = self._items[:]
        del self._items[: len(items)]
        self._next += len(items)
        return first, items

    def _close_iterator(self) -> None:
        close = getattr(self._iterator, "close", None)
        self._solitary = None
        if close is None or self._is_exhausted:
            return

        def run() -> None:
            with self._state:
                close()

        try:
            self._context.run(run)
        except BaseException as e:
            log_close_error(self._scope, self._label, e)
