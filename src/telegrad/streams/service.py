"""Open streams of one worker: those that it serves, and those that it reads."""

import itertools
from collections.abc import Iterator
from typing import Final, Protocol

from telegrad.errors import NotInitialized, WorkerLost
from telegrad.streams.batches import WireBatch
from telegrad.worker import Worker
from telegrad.worker.losses import LossReason
from telegrad.worker.scope import Scope

__all__ = ["AnyProducer", "AnyReceiver", "Streams"]

_KEY: Final = "streams"  # in a worker's attachments
_MOST_CLOSED_EARLY: Final = 1000  # far more requests than a caller opens while a large one travels


class AnyProducer(Protocol):
    """Callee's side of a stream."""

    key: tuple[int, int]

    def pull(self, credit: int, /) -> object: ...

    def flush(self) -> WireBatch: ...

    def close(self) -> None: ...

    def current_run(self) -> tuple[object, ...] | None: ...


class AnyReceiver(Protocol):
    """Caller's side of a stream."""

    label: str
    peer: int

    def lose(self, error: WorkerLost) -> None: ...

    def stop(self, error: Exception) -> None: ...

    def idle_call(self) -> tuple[object, ...] | None: ...

    def detach_after_fork(self, error: Exception) -> None: ...

    @property
    def has_reader(self) -> bool: ...


class Streams:
    """Table of the open streams of a worker.

    A graceful shutdown does not wait for streams that no thread waits for: neither for the requests that fetch items
    ahead, nor for the steps of generators that serve them. A thread that waits for an item counts at its own worker.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker: Worker = worker
        self.producers: dict[tuple[int, int], AnyProducer] = {}  # by the caller's id, and its number for the stream
        self._closed_early: dict[tuple[int, int], bool] = {}  # closed before the request that opens them has arrived
        self.receivers: dict[int, AnyReceiver] = {}  # by number
        self.numbers: Iterator[int] = itertools.count(1)  # of new streams of this caller
        self.scope: Scope = Scope(worker, 0, 1)  # of streams that are opened outside of handlers

    @classmethod
    def of(cls, worker: Worker) -> "Streams":
        """Return the table of a worker, which the first stream creates."""
        found: Streams | None = worker.attachments.get(_KEY)
        if found is None:
            created = cls(worker)
            found = worker.attachments.setdefault(_KEY, created)
            if found is created:
                worker.members.session_listeners.append(created._on_session_end)
                worker.passive_work.append(created._passive_work)
                worker.waiting_readers.append(created._waiting_readers)
                worker.on_close.append(created.close)
                worker.on_fork.append(created.detach_after_fork)
        return found

    @classmethod
    def existing(cls, worker: Worker) -> "Streams | None":
        """Return the table of a worker; None if it has had no streams."""
        found: Streams | None = worker.attachments.get(_KEY)
        return found

    # ---- streams that other workers read

    def add(self, producer: AnyProducer, is_canceled: bool) -> None:
        """Add a stream; close it at once if its caller is lost, or has closed it.

        Args:
            producer: The stream.
            is_canceled: The request that opens it is canceled, for example because its session has ended. Another
                process of the caller may have a stream with the number.
        """
        if not is_canceled:
            self.producers[producer.key] = producer
        closed = self._closed_early.pop(producer.key, False)
        if closed or producer.key[0] in self.worker.members.lost or self.worker.closed:
            producer.close()

    def close_one(self, key: tuple[int, int], is_opening: bool) -> None:
        """Close a stream.

        Args:
            key: The caller's id, and its number for the stream.
            is_opening: The request that opens the stream may arrive later.
        """
        if is_opening:  # before the look-up: the request may run in another thread
            self._closed_early[key] = True
        producer = self.producers.get(key)
        if producer is not None:
            self._closed_early.pop(key, None)
            producer.close()
        elif len(self._closed_early) > _MOST_CLOSED_EARLY:  # of requests that were canceled before they ran
            self._closed_early.pop(next(iter(self._closed_early)), None)

    def remove(self, producer: AnyProducer) -> None:
        """Remove a stream that has ended."""
        if self.producers.get(producer.key) is producer:  # else another process of the caller has the number
            self.producers.pop(producer.key, None)

    # ---- the ends of sessions

    def _on_session_end(self, peer: int, why: LossReason) -> None:
        """End the streams that belong to the session with a peer."""
        for key in [key for key in list(self._closed_early) if key[0] == peer]:
            self._closed_early.pop(key, None)
        for producer in [producer for producer in list(self.producers.values()) if producer.key[0] == peer]:
            self.remove(producer)
            self.worker.pool.submit(producer.close)  # runs code of the program
        name = self.worker.members.name_of(peer)
        for receiver in [receiver for receiver in list(self.receivers.values()) if receiver.peer == peer]:
            receiver.lose(WorkerLost(name, str(why), why.incarnation))

    # ---- shutdown

    def _passive_work(self) -> set[object]:
        calls = [receiver.idle_call() for receiver in list(self.receivers.values())]
        runs = [producer.current_run() for producer in list(self.producers.values())]
        return {work for work in (*calls, *runs) if work is not None}

    def _waiting_readers(self) -> int:
        return sum(receiver.has_reader for receiver in list(self.receivers.values()))

    def close(self) -> None:
        """Close all streams; generators run their ``finally`` blocks in this thread."""
        for receiver in list(self.receivers.values()):
            receiver.stop(NotInitialized.closed())
        for producer in list(self.producers.values()):
            producer.close()

    def detach_after_fork(self) -> None:
        """Fail the streams in a forked child, which has no thread for their items."""
        for receiver in list(self.receivers.values()):
            receiver.detach_after_fork(NotInitialized())

    def left(self) -> dict[str, int]:
        """Return the counts that are zero on a quiescent worker."""
        return {"streams read by other workers": len(self.producers), "streams not closed": len(self.receivers)}
