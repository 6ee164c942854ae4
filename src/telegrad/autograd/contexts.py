"""The autograd contexts of one worker: how they begin and end on this worker.

A context begins on the worker that opens it, its *root*, and on every other worker with the first request of the
context that arrives. Each worker counts the requests that it sends in a context, by receiver, and those that it
receives, by sender. At the end of a context, each sender notifies its receivers of its count; these end the context as
well, and notify the receivers of their own requests.

A request may arrive after that notification, because its caller has timed out or the notification overtook it. Such a
request must not begin the context again. Therefore a worker keeps a *tombstone* of an ended context while the counts
differ: until all announced requests have arrived, and all senders have announced theirs. A context that is opened and
ended without a request to another worker costs no message and no memory.

The counts of two workers belong to their session. Its end drops those of both: the next session counts from zero, in a
new epoch of the sender. A request or notification that was counted in an earlier one is not sent (`Outgoing::epoch` in
the core), and one that arrives after the end of its session counts nothing. Otherwise a tombstone would wait for
requests that never arrive. The return of a lost worker begins another epoch: requests to it may have failed meanwhile.

The loss of a root ends a context, too, and so does the loss of the only worker that sent requests. But the root may be
alive, if only a session has ended: then its later passes need what would be recorded here. So a context that a loss has
ended is *broken*, and so are those of the receivers: what is sent in it raises an error instead of going without it.

The root keeps no tombstones: its ids are never reused, so a context that is not in its table has ended.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.incomplete import register
from telegrad.autograd.plain.interception import install
from telegrad.autograd.plain.records import PLAIN, PlainContext
from telegrad.autograd.recording import record_received, record_sent
from telegrad.errors import NotInitialized, WorkerLost
from telegrad.worker.diagnostics.size_warning import SizeWarning

__all__ = ["ID_BITS", "Contexts"]

ID_BITS = 48  # of the id of a context or message; the bits above are the id of the worker that assigned it
_MAX_TOMBSTONES = 4096  # a request that timed out may never have left, so some counts never match


class Contexts:
    """The table of one worker.

    Thread-safe; no lock is held while a message is sent or a tensor is freed.

    Args:
        worker_id: The worker's id.
        first_id: Start of the counters; no earlier incarnation of the worker may have used an id from it on.
        notify_end: Notifies a peer that a context has ended: (peer, (context id, number of requests), epoch). After a
            loss the number is (number of requests, id of the lost worker).
        on_end: Called with each context that has ended, and the reason.
        is_open: Returns whether the session of a connection has not ended.
        warning: Warning about many contexts.
        name_of: Returns the name of a worker, for errors.
        last_lost: Returns the incarnation of a worker's last ended process, for errors.
    """

    def __init__(
        self,
        worker_id: int,
        first_id: int,
        notify_end: Callable[[int, tuple[int, object], int], None],
        on_end: Callable[[Context, str], None],
        is_open: Callable[[int], bool],
        warning: SizeWarning | None = None,
        name_of: Callable[[int], str] = str,
        last_lost: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.worker_id = worker_id
        self.table: dict[int, Context] = {}
        self.tombstones: dict[int, dict[int, int]] = {}
        """Ended contexts: for each peer, the requests that it has announced less those that have arrived. Never 0."""
        self.broken: dict[int, Context] = {}
        """Contexts with a tombstone that a loss has ended. What is sent in them raises an error."""
        self._orphans: dict[int, Context] = {}  # the last ones that a loss has ended without a tombstone
        self.plain: PlainContext = PlainContext(worker_id)
        self.leaked: int = 0
        """Number of contexts opened by this worker that were still open when the worker was closed."""
        self._notify_end = notify_end
        self._on_end = on_end
        self._is_open = is_open
        self._warning = warning
        self._name_of = name_of
        self._last_lost = last_lost
        self._closed = False
        self._lock = threading.Lock()
        base = worker_id << ID_BITS
        self._context_ids = itertools.count(base + first_id % (1 << ID_BITS) + 1)
        self._message_ids = itertools.count(base + first_id % (1 << ID_BITS) + 1)
        register(self)

    @property
    def max_id(self) -> int:
        """The largest id that this worker may assign."""
        return (self.worker_id << ID_BITS) + (1 << ID_BITS) - 1

    # ---- begin and end

    def open(self) -> Context:
        """Create a context with this worker as its root.

        Raises:
            NotInitialized: The worker is closed.
        """
        if self._closed:
            raise NotInitialized
        install()
        context = Context(next(self._context_ids))
        self.table[context.id] = context
        self._check_size()
        return context

    def find_for_reply(self, context_id: int) -> Context | None:
        """Return the context of a received reply, also one that a loss has ended."""
        return self.find(context_id) or self.broken.get(context_id)

    def find(self, context_id: int) -> Context | None:
        """Return the context with an id, or None if it has ended on this worker."""
        return self.plain if context_id == PLAIN else self.table.get(context_id)

    def on_request(self, context_id: int, peer: int, connection: int) -> Context | None:
        """Count a request made in a context; see `AutogradHooks.on_request_in_context`."""
        if context_id == PLAIN:
            return self.plain
        with self._lock:
            context = self.table.get(context_id)
            if peer == self.worker_id or self._closed or not self._is_open(connection):
                return context  # of an ended session: its counts have been dropped
            if context is None:
                if context_id >> ID_BITS == self.worker_id:
                    return None
                tombstone = self.tombstones.get(context_id)
                if tombstone is not None:
                    broken = self.broken.get(context_id)
                    self._adjust(context_id, tombstone, peer, -1)
                    return broken
                install()
                context = self.table[context_id] = Context(context_id)
            context.requests_received[peer] = context.requests_received.get(peer, 0) + 1
        self._check_size()
        return context

    def _check_size(self) -> None:
        if self._warning is not None:
            self._warning.check(len(self.table))

    def end(self, context: Context, why: str = "it was left", lost_worker: int | None = None) -> None:
        """End a context on this worker, and on all workers that received its requests.

        Args:
            context: The context.
            why: The reason, for errors.
            lost_worker: Id of a worker, if its loss is the reason.
        """
        with self._lock:
            if self.table.pop(context.id, None) is None:
                return
            context.lost_worker = lost_worker
            context.lost_incarnation = 0 if lost_worker is None else self._last_lost(lost_worker)
            if context.requests_received and context.id >> ID_BITS != self.worker_id:
                self._add_tombstone(context.id, {peer: -count for peer, count in context.requests_received.items()})
            if lost_worker is not None and context.id in self.tombstones:
                self.broken[context.id] = context
            elif lost_worker is not None:
                self._orphans[context.id] = context
                if len(self._orphans) > _MAX_TOMBSTONES:
                    del self._orphans[next(iter(self._orphans))]
        self._release(context, why)

    def on_ended(
        self, peer: int, context_id: int, requests: int, connection: int, lost_worker: int | None = None
    ) -> None:
        """Process a peer's notification that a context has ended.

        Args:
            peer: The peer.
            context_id: The context.
            requests: The number of requests that the peer has sent this worker in the context.
            connection: The connection of the notification. If its session has ended, the end of the session has ended
                the context, or another worker will.
            lost_worker: Id of a worker, if its loss has ended the context at the peer.
        """
        if context_id >> ID_BITS == self.worker_id:
            return  # a root's context ends when the program leaves it
        with self._lock:
            if not self._is_open(connection):
                return
            context = self.table.pop(context_id, None)
            tombstone = self.tombstones.get(context_id)
            if tombstone is None:
                received = {} if context is None else context.requests_received
                tombstone = {sender: -count for sender, count in received.items()}
                self._add_tombstone(context_id, tombstone)
            if lost_worker is not None:
                broken = context or Context(context_id)
                broken.lost_worker, broken.ended = lost_worker, context is None
                broken.lost_incarnation = self._last_lost(lost_worker)
                self.broken[context_id] = broken
            self._adjust(context_id, tombstone, peer, requests)
        if context is not None:
            self._release(context, f"worker {peer} ended it")

    def _release(self, context: Context, why: str) -> None:
        """Free the records of a context that is in no table, and notify its receivers."""
        with context.lock:
            context.ended = True
            requests_sent, context.requests_sent = context.requests_sent, {}
            sent_in, context.sent_in = context.sent_in, {}
            if context.lost_worker is not None:
                lost = self._name_of(context.lost_worker), context.lost_incarnation
                context.lost_sends.update(dict.fromkeys(context.sends, lost))
            freed = context.sends, context.receipts, context.gradients
            context.sends, context.receipts, context.gradients = {}, {}, {}
        self._on_end(context, why)
        del freed
        for peer, requests in requests_sent.items():
            what = requests if context.lost_worker is None else (requests, context.lost_worker)
            self._notify_end(peer, (context.id, what), sent_in.get(peer, 0))

    # ---- tombstones; with the lock held

    def _add_tombstone(self, context_id: int, tombstone: dict[int, int]) -> None:
        if len(self.tombstones) >= _MAX_TOMBSTONES:
            oldest = next(iter(self.tombstones))
            del self.tombstones[oldest]
            self.broken.pop(oldest, None)
        self.tombstones[context_id] = tombstone

    def _adjust(self, context_id: int, tombstone: dict[int, int], peer: int, change: int) -> None:
        balance = tombstone.pop(peer, 0) + change
        if balance:
            tombstone[peer] = balance
        if not tombstone:
            self.tombstones.pop(context_id, None)
            self.broken.pop(context_id, None)

    # ---- the group

    def peer_lost(self, peer: int, epoch: int) -> list[Context]:
        """End the contexts that a lost worker opened, or that got requests only from it.

        Args:
            peer: The worker.
            epoch: Epoch of the messages to it from now on.

        Returns:
            The other contexts.
        """
        with self._lock:
            for context_id, tombstone in list(self.tombstones.items()):
                if tombstone.pop(peer, 0) and not tombstone:
                    del self.tombstones[context_id]
                    self.broken.pop(context_id, None)
            ending: list[Context] = []
            remaining: list[Context] = []
            for context in list(self.table.values()):  # `open` adds contexts without the lock
                is_root = context.id >> ID_BITS == self.worker_id
                requests = context.requests_received.pop(peer, 0)
                orphan = not is_root and requests and not context.requests_received
                (ending if orphan or context.id >> ID_BITS == peer else remaining).append(context)
        for context in ending:
            with context.lock:
                if context.sent_in.get(peer, epoch) < epoch:
                    del context.requests_sent[peer], context.sent_in[peer]
            self.end(context, f"worker {peer} is lost", peer)
        for context in remaining:
            with context.lock:
                self._begin_epoch(context, peer, epoch)
                # A request may have been made since the next epoch began: it will be sent.
                messages = [m for m, sent in context.sends.items() if sent.peer == peer and sent.epoch < epoch]
                lost = self._name_of(peer), self._last_lost(peer)
                context.lost_sends.update(dict.fromkeys(messages, lost))
                dropped = [context.sends.pop(message) for message in messages]
            del dropped
        self.plain.release_for({peer}, epoch)
        return [*remaining, self.plain]

    def peer_joined(self, peer: int, epoch: int) -> None:
        """Count requests to a returned worker from zero.

        Args:
            peer: The worker.
            epoch: Epoch of the messages to it from now on.
        """
        with self._lock:
            contexts = list(self.table.values())
        for context in contexts:
            with context.lock:
                self._begin_epoch(context, peer, epoch)
        self.plain.release_for({peer}, epoch)

    @staticmethod
    def _begin_epoch(context: Context, peer: int, epoch: int) -> None:
        """Drop the count of an earlier epoch, with the context's lock held.

        A peer that lives is notified when the context ends: it may have got requests in an earlier session.
        """
        if context.sent_in.get(peer, epoch) < epoch:
            context.requests_sent[peer], context.sent_in[peer] = 0, epoch

    def close(self) -> None:
        """End all contexts without notifying any peer."""
        with self._lock:
            self._closed = True
            contexts = list(self.table.values())
            self.table.clear()
            self.tombstones.clear()
            self.broken.clear()
            self._orphans.clear()
        self.leaked += sum(context.id >> ID_BITS == self.worker_id for context in contexts)
        for context in [*contexts, self.plain]:
            context.requests_sent, context.sent_in = {}, {}
            self._release(context, "this worker shuts down")
        self.plain.close()

    def detach_after_fork(self) -> None:
        """Discard the state in a forked child: no thread will release the parent's locks."""
        self._closed = True
        self._lock = threading.Lock()
        self.table, self.tombstones, self.broken, self._orphans = {}, {}, {}, {}

    # ---- messages

    def on_send(
        self, context: Context, peer: int, tensors: Sequence[Tensor], request: bool, epoch: int = 0
    ) -> int | None:
        """Record a message that is about to leave; see `AutogradHooks.on_send`.

        Raises:
            WorkerLost: A loss has ended the context here. A message without it would get no gradient.
        """
        message = next(self._message_ids) if tensors else 0
        record = record_sent(message, peer, tensors, epoch if request else 0) if tensors else None
        with context.lock:
            if context.ended:
                if context.lost_worker is not None:
                    raise self.loss_of(context)
                return None
            if record is not None:
                context.sends[message] = record
                if context is self.plain:
                    self.plain.on_sent(record)
            if request and peer != self.worker_id and not context.is_plain:
                self._count(context, peer, epoch)
        return message

    def find_loss(self, context_id: int, peer: int) -> WorkerLost | None:
        """Return the error of a context that the loss of another worker has ended."""
        with self._lock:
            context = self.broken.get(context_id) or self._orphans.get(context_id)
        return None if context is None or context.lost_worker == peer else self.loss_of(context)

    def loss_of(self, context: Context) -> WorkerLost:
        """Return the error of a context that a loss has ended."""
        root, lost = (self._name_of(worker) for worker in (context.id >> ID_BITS, context.lost_worker or 0))
        why = f"so autograd context {context.id} of worker {root} has ended on worker {self._name_of(self.worker_id)}"
        return WorkerLost(lost, why, context.lost_incarnation)

    @staticmethod
    def _count(context: Context, peer: int, epoch: int) -> None:
        """Count a request, with the context's lock held."""
        counted = context.sent_in.get(peer, epoch)
        if epoch < counted:
            return  # its epoch has ended meanwhile: it will not be sent
        before = context.requests_sent.get(peer, 0) if epoch == counted else 0
        context.requests_sent[peer], context.sent_in[peer] = before + 1, epoch

    def rollback(self, context: Context, message: int, peer: int, epoch: int | None) -> None:
        """Remove the record of a message that did not leave.

        `epoch` is that of a request, None for a reply.
        """
        if context is self.plain:
            self.plain.release((message,))
            return
        with context.lock:
            record = context.sends.pop(message, None)
            if epoch is not None and context.sent_in.get(peer) == epoch:
                context.requests_sent[peer] -= 1  # 0 stays: the peer may have got requests in an earlier session
        del record

    def wrap(self, context: Context, peer: int, message: int) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        """Return the function that records received tensors; see `AutogradHooks`."""
        if context is self.plain:
            install()
            return self.plain.receipt(peer, message)
        return partial(self.on_receive, context, peer, message)

    def on_receive(self, context: Context, peer: int, message: int, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Record received tensors, and return those that the program gets.

        The given tensors do not require grad."""
        record, outputs = record_received(message, peer, tensors)
        with context.lock:
            if not context.ended:
                context.receipts[message] = record
        return outputs
