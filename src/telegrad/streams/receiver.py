"""Caller's side of a stream: fetches items ahead of the reader.

At most one request for items is in progress. The next one leaves when its batch arrives, as long as the items and bytes
ahead of the reader stay within their limits. A generator that waits within a step may hold back items of its batch:
a reader that has waited for `FLUSH_DELAY` asks for them with a second request (`flush`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import starmap
from typing import Any, Final, NoReturn

import torch

from telegrad.errors import Cancelled, NotInitialized, RemoteError, StreamError, TelegradError, WorkerLost
from telegrad.serialize.tracebacks import is_of_signal_handler
from telegrad.streams import serving
from telegrad.streams.batches import CLOSED, ENDED, LIVE, WireBatch
from telegrad.streams.read_errors import closed_at_callee, expired, raise_to_reader
from telegrad.streams.receiver_state import ReceiverState
from telegrad.streams.requests import guarded, notify_closed, start_step
from telegrad.streams.service import Streams
from telegrad.worker import Worker
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.scope import Scope

__all__ = ["FLUSH_DELAY", "Receiver"]

FLUSH_DELAY: Final = 200_000
"""Time in ns that a reader waits before it asks for items that the callee holds back."""

_MOST_BYTES: Final = 32 << 20  # ahead of the reader, apart from the batch in progress

# torch.futures.Future.value only calls this.
_value: Callable[[torch.futures.Future[Any]], WireBatch] = torch._C.Future.value


class Receiver(ReceiverState):
    """Items of one stream that have arrived, and the requests for more.

    Thread-safe. The futures of its requests and the table of the worker hold it, so the `Stream` of the program can be
    collected, which closes it.

    Args:
        worker: The worker that reads.
        peer: Id of the callee.
        label: Name of the function.
        timeout: Limit in ns for each wait; 0 for none.
        prefetch: Most items ahead of the reader.
        scope: Scope of the code that opens the stream.
    """

    failed: bool  # assigned in this class

    def __init__(self, worker: Worker, peer: int, label: str, timeout: int, prefetch: int, scope: Scope | None) -> None:
        self.worker: Worker = worker
        self.peer: int = peer
        self.label: str = label
        self.timeout: int = timeout
        self.lock: threading.Lock = threading.Lock()
        self._streams = streams = Streams.of(worker)
        self._number = next(streams.numbers)
        self._prefetch = prefetch
        self._credit = prefetch // 2 or 1  # of the next request
        self._scope = streams.scope if scope is None else scope
        self._ready: deque[WireBatch] = deque()

    def __str__(self) -> str:
        return f"the stream of {self.label} on {self.worker.members.name_of(self.peer)}"

    # ---- requests

    def open(self, function: object, args: object, kwargs: object, receiver: Any, introduce: bool) -> None:
        """Run the function and request its first item.

        Args:
            function: The function, or its name as bytes; with a receiver, the name of a method.
            args: Its arguments.
            kwargs: Its keyword arguments.
            receiver: An RRef, or None.
            introduce: The owner may not know the receiver yet.

        Raises:
            SerializationError: An argument cannot be serialized.
            TelegradError: There is no such worker, or this worker is closed.
        """
        run: object = serving.open_function if receiver is None else serving.open_method
        worker, number = self.worker, self._number
        arguments = (worker.info.id, number, function, args, kwargs)
        call: tuple[Any, ...] = (self.peer, run, arguments, {}, 0, receiver, introduce, False, True)
        sent: list[CallFuture[WireBatch]] = []
        try:
            self._streams.receivers[number] = self
            sent.extend(starmap(worker.calls.client.start, (call,)))  # has the future before a signal handler can run
            self._pull = sent[0]
            self._watch(sent[0], self._on_pull)
        except BaseException as e:
            for future in sent:
                future._abandon()
            self._give_up(e)
            raise

    def _watch(self, future: CallFuture[Any], arrived: Callable[[CallFuture[Any]], None]) -> None:
        future._mark_read()  # the reader gets the error
        future._set_request((self.peer, f"a step of {self.label}", 0))
        future._on_done(guarded(arrived, self._break_off))

    def _start(self, function: object, *args: int) -> CallFuture[Any]:
        return start_step(self.worker, self.peer, self._scope, function, (self._number, *args), not self.is_async)

    def _claim_pull(self) -> int:
        """Return the credit of a request to send now, or 0; with the lock held."""
        if self._is_pulling or self._has_ended or self._is_closed or self._error is not None:
            return 0
        if self._early:  # an earlier, large batch is on its way; this one may be the last
            return 0
        ahead = self._arrived - self._taken + self._current
        credit = min(self._credit, self._prefetch - ahead)
        if credit <= 0 or 2 * ahead > self._prefetch or self._bytes >= _MOST_BYTES:
            return 0
        self._is_pulling = True
        self._pulls += 1
        self._may_hold = credit > 1
        return credit

    def _send_pull(self, credit: int) -> None:
        try:
            self._pull = future = self._start(serving.pull, credit)
            self._watch(future, self._on_pull)
        except BaseException as e:
            self._is_pulling = False
            self._give_up(e)
            if not isinstance(e, Exception) or is_of_signal_handler(e):
                raise

    def flush(self) -> None:
        """Request what the callee holds back, for a reader that waited `FLUSH_DELAY`."""
        with self.lock:
            self._is_slow = True
            if self._is_live or not self._may_hold or not self._is_pulling or self._flushing is not None:
                return
            self._flushing = self._pulls
        try:
            future = self._start(serving.flush)
        except BaseException as e:
            self._flushing = None
            if not isinstance(e, TelegradError):  # else the request in progress fails for the same reason
                self._give_up(e)  # items may be lost
                raise
            return
        self._flush = future
        self._watch(future, self._on_flush)

    # ---- arrivals

    def _on_pull(self, future: CallFuture[WireBatch]) -> None:
        error = None if future._failure is None else future._failure.error
        with self.lock:
            self._pull = None
            self._is_pulling = False
            self._is_opening = self._is_opening and isinstance(error, Cancelled)
            if error is not None:
                self._fail(error)
            else:
                batch = _value(future)
                if self._is_slow:
                    self._credit = 1
                elif len(batch[3]) >= self._credit:
                    self._credit = min(2 * self._credit, max(self._prefetch // 2, 1))
                self._is_slow = False
                self._accept(batch)
                is_broken = self._fail_if_broken()
                if self._loss is not None and not self._has_ended:
                    self._fail(self._loss)
                if self._is_closed:
                    self._streams.receivers.pop(self._number, None)
            credit = self._claim_pull()
            if error is None:
                # The first notification may have reached the callee before the stream was open there.
                must_close = is_broken or (self._is_closed and not self._has_ended and not self._pulls)
            else:  # the callee keeps the stream if it could not send an item
                must_close = not isinstance(error, (WorkerLost, NotInitialized))
            if self._changed is not None or self.wake is not None:
                self._notify()
        if must_close:
            self._tell_closed()
        if credit:
            self._send_pull(credit)

    def _on_flush(self, future: CallFuture[WireBatch | None]) -> None:
        with self.lock:
            flushed, self._flush, self._flushing = self._flushing, None, None
            self._flush_error = future.failure()
            batch = future.value() if self._flush_error is None else None
            if batch is not None and batch[3]:
                self._accept(batch)
            elif flushed == self._pulls:
                self._may_hold = False  # the request in progress returns with its next item
            is_broken = self._fail_if_broken()
            credit = self._claim_pull()  # the request in progress may have returned first
            self._notify()
        if is_broken:
            self._tell_closed()
        if credit:
            self._send_pull(credit)

    def _accept(self, batch: WireBatch) -> None:
        following: WireBatch | None = batch
        if batch[0] < 0:  # `NO_STREAM`
            lost = self.worker.members.last_lost(self.peer)
            self._fail(self._closed_by_callee(lost))
            return
        if batch[0] != self._arrived:
            if self._early is None:
                self._early = {}
            self._early[batch[0]] = batch
            return
        while following is not None:
            _, state, size, items = following
            self._arrived += len(items)
            self._is_live = state == LIVE
            if state == ENDED:
                self._has_ended = True
            elif state == CLOSED:  # by this reader, or by the callee
                members = self.worker.members
                self._fail(self._closed_by_callee(members.lost_incarnation(self.peer, "")))
            if items and not self._is_closed:
                self._ready.append(following)
                self._bytes += size
            following = self._early.pop(self._arrived, None) if self._early else None
        if self._has_ended:
            self._streams.receivers.pop(self._number, None)

    def _fail_if_broken(self) -> bool:
        """Fail if a flush has lost items that a batch waits for; return whether so."""
        if not self._early or self._flushing is not None or self._flush_error is None:
            return False
        self._early = None
        self._fail(self._flush_error)
        return True

    def _closed_by_callee(self, incarnation: int) -> TelegradError:
        """Return the error of a stream that its callee has closed before its end."""
        if self.worker.closed:
            return NotInitialized.closed()
        return WorkerLost(self.worker.members.name_of(self.peer), closed_at_callee(self.label), incarnation)

    def _fail(self, error: BaseException) -> None:
        if self._loss is not None and isinstance(error, WorkerLost) and not isinstance(error, RemoteError):
            error = self._loss
        if self._error is None:
            self._error = error
        self._streams.receivers.pop(self._number, None)

    def _give_up(self, error: BaseException) -> None:
        """End the stream at both workers because a request has failed."""
        with self.lock:
            self._fail(error)
            self._notify()
        self._tell_closed()

    def _break_off(self, error: BaseException) -> None:
        self._is_pulling, self._pull, self._flush, self._flushing = False, None, None, None
        self._give_up(error)

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.notify_all()
        if self.wake is not None:
            self.wake()

    # ---- the reader

    def take(self, reader: object) -> tuple[list[Any] | None, bool]:
        """Return the next batch, and whether there may be more; never blocks.

        (None, True): the reader has to wait for an arrival. It then has a claim on the stream until `end_read`.

        Args:
            reader: The thread or task that reads.

        Raises:
            StreamError: Another one waits for an item, or the stream was closed.
            Exception: The error that ended the stream.
        """
        with self.lock:
            if self._reader is not None and self._reader != reader:
                raise StreamError(f"{self} is read by two threads or tasks at once. Read it in one, and pass items on.")
            self._taken += self._current
            self._current = 0
            self._bytes -= self._current_bytes
            self._current_bytes = 0
            items = None
            if self._ready:
                _, _, self._current_bytes, items = self._ready.popleft()
                self._current = len(items) - 1  # the reader uses the first item now
                self._taken += 1
            elif self.failed or self._is_closed:
                raise StreamError(self.describe_end())
            elif self._has_failed():
                self._raise_error()
            more = items is not None or not self._has_ended
            if not more:
                self._has_seen_end = True
            elif items is None:
                self._reader = reader
            credit = self._claim_pull()
        if credit:
            self._send_pull(credit)
        return items, more

    def end_read(self) -> None:
        """Release the claim of a reader that waited."""
        self._reader = None

    def drive(self, timeout: int) -> None:
        """Wait for an arrival in this thread, which polls the network.

        Args:
            timeout: Limit in ns; 0 for none.
        """
        until = time.monotonic_ns() + timeout
        with self.lock:
            if self._has_news():
                return  # the call that brought them is no longer the one to wait for
            future: CallFuture[Any] | None = self._pull if self._flush is None else self._flush
        polled = None if future is None else future._polled()
        if polled is not None and (call := polled._call_id()):
            try:
                if polled._calls.client.wait(polled, call, timeout):
                    return
            except NotInitialized:  # the worker has closed
                pass
        with self.lock:  # another thread handles the completion
            if self._changed is None:
                self._changed = threading.Condition(self.lock)
            self._changed.wait_for(self._has_news, (until - time.monotonic_ns()) / 1e9 if timeout else None)

    def _raise_error(self) -> NoReturn:
        assert self._error is not None
        self.failed = True
        raise_to_reader(self, self._error, self._taken)

    def begin_expiry(self) -> None:
        """End the request in progress after the timeout of a wait.

        Its error says how far it had come, and arrives within `STATE_GRACE`, unless the items do.
        """
        future = self._pull  # another thread may process its reply
        if future is not None:
            self.worker.calls.client.expire(future._polled()._call_id())

    def expire(self) -> NoReturn:
        """Close the stream after the timeout of a wait.

        Raises:
            RpcTimeout: always.
        """
        error = expired(self, self._error, self.timeout, self._taken)
        self.failed = True
        self.close()  # notifies the callee unless `_error` says that the stream has ended
        self._error = error
        raise error

    # ---- the end

    def close(self) -> None:
        """Discard the items and close the generator; does nothing the second time."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._ready.clear()
            self._early = None
            self._notify()
            is_open = not self._has_ended and self._error is None
            if not self._is_pulling:
                self._streams.receivers.pop(self._number, None)
            futures: tuple[CallFuture[Any] | None, ...] = (self._flush, self._pull)
            # A thread that waits for one of these polls the network, and checks for nothing else. And before the first
            # item, the request may wait for a thread of the callee, or its function may ask whether it is canceled.
            cancel = (self._reader is not None and not self.is_async) or not self._pulls
        if is_open:
            self._tell_closed()
        for future in filter(None, futures if cancel else ()):
            future.cancel()

    def _tell_closed(self) -> None:
        notify_closed(self.worker, self.peer, self._scope, self._number, self._is_opening)

    def lose(self, error: WorkerLost) -> None:
        """End an open stream because the session with its callee has ended.

        If a request is in progress, its end is that of the stream: its items may have arrived. The one that opens the
        stream may belong to the next session.
        """
        with self.lock:
            if self._is_opening:
                return
            self._loss = error
            if not self._is_pulling and not self._has_ended:
                self._fail(error)
            self._notify()

    def stop(self, error: Exception) -> None:
        """End the stream because the worker leaves."""
        with self.lock:
            if self._error is self._loss and not self.failed:
                self._error = None
            self._fail(error)
            self._notify()

    def detach_after_fork(self, error: Exception) -> None:
        """End the stream in a forked child, where a missing thread may hold the lock."""
        self.lock, self._changed, self._flushing = threading.Lock(), None, None
        self.stop(error)
