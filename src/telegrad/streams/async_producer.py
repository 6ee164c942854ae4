"""Callee's side of a stream whose items an asynchronous iterator produces.

One coroutine on the event loop of the worker runs the iterator while the caller has given credit. A request for items
gets what is there when the iterator waits for something else. So no item is held back.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from telegrad.errors import NotInitialized
from telegrad.streams.batches import CLOSED, ENDED, LIVE, SOLITARY, WireBatch, copy_item, size_of
from telegrad.streams.producer import BATCH_TIME, Ended, log_close_error
from telegrad.worker.scope import Scope, caller_flags, caller_state, not_needed

__all__ = ["AsyncProducer"]


class AsyncProducer:
    """Asynchronous iterator of one stream.

    All its state belongs to the thread of the event loop.

    Args:
        key: The caller's id, and its number for the stream.
        iterator: Produces the items.
        label: Name of the function that returned the iterator.
        scope: Scope of the request that opened the stream.
        ended: Removes the stream from the table of this worker.
    """

    def __init__(
        self, key: tuple[int, int], iterator: AsyncIterator[object], label: str, scope: Scope, ended: Ended
    ) -> None:
        self.key: tuple[int, int] = key
        self._iterator = iterator
        self._label = label
        self._scope = scope
        self._ended = ended
        self._next = 0  # number of the first item of the batch
        self._items: list[Any] = []  # the batch
        self._size = 0  # of the batch, if its item is solitary
        self._error: BaseException | None = None  # for the next request
        self._is_exhausted = False
        self._is_closing = False
        self._credit = 0  # items that the caller admits
        self._until = 0  # when the batch of the request in progress is complete, monotonic ns
        self._is_flush_scheduled = False
        self._request: asyncio.Future[None] | None = None  # waits for the batch
        self._refill: asyncio.Future[None] | None = None  # waits for credit
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        scope.worker.loop.run(self._run(), scope, caller_flags(), caller_state(), None, self._stopped)

    def current_run(self) -> None:
        """Return None: no request runs the iterator in its own thread."""

    # ---- requests of the caller

    async def pull(self, credit: int) -> WireBatch:
        """Return the next items as soon as there is one.

        Args:
            credit: Most items to produce.

        Raises:
            Exception: Whatever the iterator raises, once all earlier items have been returned.
        """
        self._scope.worker.handlers.name_deferred(f"a step of {self._label}")
        self._credit = credit - len(self._items)
        self._until = time.monotonic_ns() + BATCH_TIME
        self._is_flush_scheduled = False
        _resolve(self._refill)
        while not (self._items or self._is_exhausted or self._error is not None):
            self._request = asyncio.get_running_loop().create_future()
            await self._request
        self._request = None
        first, size, items = self._next, self._size, self._items
        self._next += len(items)
        self._items, self._size = [], 0
        if self._is_exhausted or (self._error is not None and not items):
            self._ended(self)
            error, self._error = self._error, None
            if error is not None:
                raise error
        return first, CLOSED if self._is_closing else ENDED if self._is_exhausted else LIVE, size, items

    def flush(self) -> WireBatch:
        """Return no items: a request gets them as soon as possible."""
        return self._next, LIVE, 0, []

    def close(self) -> None:
        """Cancel the iterator, which runs its ``finally`` blocks at once; any thread."""
        if self._is_closing:
            return
        self._is_closing = True
        self._ended(self)
        loop = self._loop
        if loop is not None:  # else the coroutine has not started, and will see the flag
            with suppress(RuntimeError):  # the loop has ended, and with it the iterator
                loop.call_soon_threadsafe(self._cancel)

    # ---- the iterator

    async def _run(self) -> None:
        not_needed.set(lambda: self._is_closing)
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        error: BaseException | None = None
        step = self._iterator.__anext__
        try:
            while not self._is_closing:
                item = await step()
                copied = copy_item(item)
                if copied is SOLITARY:
                    await self._add_solitary(item)
                else:
                    self._items.append(copied)
                    self._credit -= 1
                    if self._request is not None:
                        self._answer()
                del item, copied  # the reply alone has the item
                while self._credit <= 0 and not self._is_closing:
                    await self._wait_for_credit()
        except StopAsyncIteration:
            self._is_exhausted = True
        except asyncio.CancelledError as e:
            if not self._is_closing:
                error = (
                    NotInitialized.closed()
                    if self._scope.worker.closed
                    else RuntimeError(f"the stream was stopped: {e!r}")
                )
        except BaseException as e:  # SystemExit too: the caller gets it
            error = e
        await self._close_iterator()
        self._stopped(None, error)

    def _answer(self) -> None:
        """Complete the request that waits.

        If its batch is not full, it gets the items of the iterator until this waits for something else.
        """
        if self._credit <= 0 or time.monotonic_ns() > self._until:
            _resolve(self._request)
        elif not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            asyncio.get_running_loop().call_soon(_resolve, self._request)

    async def _add_solitary(self, item: object) -> None:
        """Make an item the next batch, after the present one has left."""
        self._credit = 0
        _resolve(self._request)
        while self._items and not self._is_closing:
            await self._wait_for_credit()
        if self._is_closing:
            return
        self._items.append(item)
        self._size = size_of(item)
        self._credit = 0
        _resolve(self._request)

    async def _wait_for_credit(self) -> None:
        self._refill = asyncio.get_running_loop().create_future()
        await self._refill

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._stopped(None, None)

    async def _close_iterator(self) -> None:
        close = getattr(self._iterator, "aclose", None)
        if close is None:
            return
        try:
            await close()
        except BaseException as e:
            log_close_error(self._scope, self._label, e)

    def _stopped(self, _: object, error: BaseException | None) -> None:
        """Record the end of the iterator."""
        if error is not None:
            self._error = error
        elif self._error is None:
            self._is_exhausted = True
        _resolve(self._request)


def _resolve(waiting: "asyncio.Future[None] | None") -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
