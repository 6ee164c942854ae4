"""Records of messages outside of contexts: the *plain context* of a worker.

Each worker has one plain context, which has the same id everywhere and never ends. Its records end one by one. The
receiver of a message has a `Receipt`, which the node of the received tensors keeps: it lives as long as these tensors
and what was computed from them. When the garbage collector frees the receipt, the sender is notified and drops its
record, and with it the part of the graph that only this record kept. Its own receipts in that part are freed in turn.

Finalizers only append to a deque. A pool thread sends the notifications, many in one message.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from telegrad.autograd.context import Context, Received, Sent
from telegrad.autograd.recording import record_received

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    from telegrad.autograd.context import Entry, Records
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

    __slots__ = ("context", "id", "outputs", "peer")

    def __init__(self, context: PlainContext, peer: int, message: int) -> None:
        self.context: PlainContext = context
        self.id: int = message
        self.peer: int = peer
        self.outputs: int = 0  # number of recorded tensors
        context.receipts[message] = peer

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Record the tensors of the message, and return those that the program gets."""
        record, outputs = record_received(self.id, self.peer, tensors)
        self.outputs = len(outputs)
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
        consumed: Sent messages, by id, whose graph a pass without `retain_graph` has run. Passes include them only if a
            gradient arrives for them.
        receipts: Received messages with live tensors: id -> sender.
        request_callback: Has a pool thread call `collect` soon. Safe in a finalizer.
        is_lost: Returns whether a worker is lost.
        name_of: Returns the name of a worker.
        backward: Runs a pass whose root is this worker.
    """

    is_plain: bool = True

    def __init__(self, worker_id: int) -> None:
        super().__init__(PLAIN)
        self.worker_id: int = worker_id
        self.consumed: dict[int, Sent] = {}
        self.receipts: dict[int, int] = {}  # type: ignore[assignment]  # without nodes: they keep the graph alive
        self.request_callback: Callable[[], None] = _no_callback
        self.is_lost: Callable[[int], bool] = _is_never_lost
        self.name_of: Callable[[int], str] = str
        self.backward: PassStarter | None = None
        self._freed: deque[int] = deque()
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

        Drops the records for lost workers, and for this worker itself.
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
        self.release([sent.id for sent in self.all_sends() if sent.peer != self.worker_id and self.is_lost(sent.peer)])
        return {peer: messages for peer, messages in by_peer.items() if not self.is_lost(peer)}

    # ---- sent messages

    def all_sends(self) -> list[Sent]:
        """Return the records of all sent messages."""
        with self.lock:
            return [*self.sends.values(), *self.consumed.values()]

    def release(self, messages: Iterable[int]) -> None:
        """Drop the records of sent messages of which the receivers have no tensor left."""
        with self.lock:
            dropped = [records.pop(message, None) for message in messages for records in (self.sends, self.consumed)]
        del dropped  # without the lock: frees graphs

    def records_for(self, sends: Sequence[int]) -> Records:
        """Return the records that a pass needs: sends, and a function that finds recvs.

        Args:
            sends: Sends that get gradients even if their graph was consumed.
        """
        with self.lock:
            again = [self.consumed[message] for message in sends if message in self.consumed]
            return [*self.sends.values(), *again], [], self.find_received

    def consume(self, message: int) -> None:
        """Exclude a message from passes that have no gradient for it.

        Its graph is about to be freed.
        """
        with self.lock:
            record = self.sends.pop(message, None)
            if record is not None:
                self.consumed[message] = record

    def close(self) -> None:
        """Drop all records: the worker is closed."""
        with self.lock:
            dropped, self.consumed = self.consumed, {}
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
