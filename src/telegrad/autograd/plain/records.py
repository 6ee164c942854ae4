"""Records of messages outside of contexts: the *plain context* of a worker.

Each worker has one plain context, which has the same id everywhere and never ends. Its records end one by one. The
receiver of a message has a `Receipt`, which the node of the received tensors keeps: it lives as long as these tensors
and what was computed from them. When the garbage collector frees the receipt, the sender is notified and drops its
record, and with it the part of the graph that only this record kept. Its own receipts in that part are freed in turn.

Finalizers only append to a deque. A pool thread sends the notifications, many in one message.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from telegrad.autograd.context import Context, Received, Sent
from telegrad.autograd.plain.components import Components
from telegrad.autograd.recording import record_received

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    from telegrad.autograd.context import Entry
    from telegrad.autograd.execution.wanted import Wanted

__all__ = ["PLAIN", "PlainContext", "Receipt", "any_receipts", "receipt_of"]

PLAIN: Final = 0
"""Id of the plain contexts. No context that a worker opens has it."""


class Receipt:
    """Receiver's part of one message: it frees the sender's record when it is freed.

    It records the tensors of the message when it is called with them. Without that call, for example because the
    message cannot be decoded, it is freed at once.

    Args:
        context: The plain context of the receiver.
        peer: The sender.
        message: Id of the message.
    """

    __slots__ = ("context", "id", "outputs", "peer", "tensors")

    def __init__(self, context: PlainContext, peer: int, message: int) -> None:
        self.context: PlainContext = context
        self.id: int = message
        self.peer: int = peer
        self.outputs: int = 0  # number of recorded tensors
        self.tensors: Sequence[weakref.ref[Tensor]] = ()
        context.receipts[message] = peer

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Record the tensors of the message, and return those that the program gets."""
        record, outputs = record_received(self.id, self.peer, tensors)
        self.outputs = len(outputs)
        self.tensors = [weakref.ref(tensor) for tensor in outputs]
        record.node.receipt = self  # type: ignore[attr-defined]  # the node of a Python function has a dict
        return outputs

    def __del__(self) -> None:
        self.context.on_receipt_freed(self.id)


def receipt_of(node: Node) -> Receipt | None:
    """Return the receipt that a node keeps; None for a node of other tensors."""
    return getattr(node, "receipt", None)


class PassStarter(Protocol):
    """Runs a backward pass from this worker (`BackwardManager.backward`)."""

    def __call__(
        self,
        context: Context,
        roots: Sequence[Entry],
        retain_graph: bool,
        gradients: Sequence[Tensor | None],
        wanted: Wanted | None,
    ) -> None: ...


class PlainContext(Context):
    """Plain context of one worker; `lock` guards its records.

    Args:
        worker_id: The worker's id.

    Attributes:
        consumed: Sent messages, by id, whose graph a pass without `retain_graph` has run.
        components: The sent messages, by the nodes that they share.
        receipts: Received messages with live tensors: id -> sender.
        request_callback: Has a pool thread call `collect` soon. Safe in a finalizer.
        is_lost: Returns whether a worker is lost.
        is_removed: Returns whether a worker is lost for good: no further session with it begins.
        name_of: Returns the name of a worker.
        backward: Runs a pass whose root is this worker.
    """

    is_plain: bool = True

    def __init__(self, worker_id: int) -> None:
        super().__init__(PLAIN)
        self.worker_id: int = worker_id
        self.consumed: dict[int, Sent] = {}
        self.components: Components = Components()
        self.receipts: dict[int, int] = {}  # type: ignore[assignment]  # without nodes: they keep the graph alive
        self.request_callback: Callable[[], None] = _no_callback
        self.is_lost: Callable[[int], bool] = _is_never_lost
        self.is_removed: Callable[[int], bool] = _is_never_lost
        self.name_of: Callable[[int], str] = str
        self.backward: PassStarter | None = None
        self._freed: deque[int] = deque()
        self._removed_peers: set[int] = set()  # that were to get messages after their removal
        self._finished_at: set[int] = set()  # workers that may still keep passes of this root that are over
        _contexts.add(self)

    # ---- received messages

    def receipt(self, peer: int, message: int) -> Receipt:
        """Return the receipt of a message that has arrived."""
        return Receipt(self, peer, message)

    def on_receipt_freed(self, message: int) -> None:
        """Record that no tensor of a message is left. For finalizers; takes no lock."""
        self._freed.append(message)
        self.request_callback()

    def find_received(self, node: Node) -> Received | None:
        """Return the record of received tensors by their node; None for those of contexts."""
        receipt = receipt_of(node)
        if receipt is None or receipt.context is not self:
            return None
        return Received(receipt.id, receipt.peer, node, receipt.outputs)

    def notify_finished(self, peers: Iterable[int]) -> None:
        """Have workers notified that a pass of this root is over."""
        self._finished_at.update(peers)
        self.request_callback()

    def collect(self) -> dict[int, list[int]]:
        """Return the workers to notify, each with the ids of its unused messages.

        Drops the records of unused messages of this worker to itself, and of messages to lost workers.
        """
        by_peer: dict[int, list[int]] = {}
        finished_at, self._finished_at = self._finished_at, set()
        for peer in finished_at:
            by_peer[peer] = []
        while self._freed:
            try:
                message = self._freed.popleft()
            except IndexError:  # another thread was faster
                break
            sender = self.receipts.pop(message, None)
            if sender is not None:
                by_peer.setdefault(sender, []).append(message)
        self.release(by_peer.pop(self.worker_id, ()))
        if self._removed_peers:
            removed, self._removed_peers = self._removed_peers, set()
            self.release_for(removed)
        return {peer: messages for peer, messages in by_peer.items() if not self.is_lost(peer)}

    # ---- sent messages

    def on_sent(self, record: Sent) -> None:
        """Process a new record, with the lock held."""
        self.components.add(record)
        if self.is_removed(record.peer):  # that has been processed already, or will find the record
            self._removed_peers.add(record.peer)
            self.request_callback()

    def find_sent(self, messages: Iterable[int]) -> list[Sent]:
        """Return the records of sent messages, without those that have been dropped."""
        with self.lock:
            found = [self.sends.get(message) or self.consumed.get(message) for message in messages]
        return [record for record in found if record is not None]

    def release(self, messages: Iterable[int]) -> None:
        """Drop the records of sent messages of which the receivers have no tensor left."""
        with self.lock:
            found = [records.pop(message, None) for message in messages for records in (self.sends, self.consumed)]
        dropped = [record for record in found if record is not None]
        self.components.drop(dropped)
        del found, dropped  # without the lock: frees graphs

    def release_for(self, peers: set[int], epoch: float = math.inf) -> None:
        """Drop the records of messages to lost workers, of epochs before `epoch`."""
        with self.lock:
            sends = [*self.sends.values(), *self.consumed.values()]
        self.release([sent.id for sent in sends if sent.peer in peers and sent.epoch < epoch])

    def consume(self, message: int) -> None:
        """Note that a pass without `retain_graph` is about to run the graph of a message."""
        with self.lock:
            record = self.sends.pop(message, None)
            if record is not None:
                self.consumed[message] = record

    def close(self) -> None:
        """Drop all records: the worker is closed."""
        with self.lock:
            dropped, self.consumed = self.consumed, {}
        self.components.clear()
        self.receipts = {}
        del dropped

    @property
    def is_empty(self) -> bool:
        """Whether no record is left."""
        return not (self.sends or self.consumed or self.receipts)


_contexts: weakref.WeakSet[PlainContext] = weakref.WeakSet()  # of all workers of this process


def any_receipts() -> bool:
    """Return whether this process has tensors that were received in a plain context."""
    return any(context.receipts for context in list(_contexts))


def _no_callback() -> None:
    pass


def _is_never_lost(_: int) -> bool:
    return False
