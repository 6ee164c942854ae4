"""The record of one worker in one autograd context: sends, receipts, gradients.

Data only. `recording.py` fills it while the forward pass runs. A `BackwardPass` reads it while `backward` runs, and
adds to `gradients`. No record keeps the data of a sent tensor alive: an edge holds the node that created the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from telegrad.errors import WorkerLost
from telegrad.protocols.backward_messages import UnknownSend

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import GradientEdge, Node

Entry: TypeAlias = "GradientEdge | Tensor"
"""Where a gradient enters torch's engine: an edge, or a leaf."""

WireMessage: TypeAlias = tuple[Any, ...]
"""A message of a pass as it travels: its kind, then fields that depend on the kind (`passes/backward_pass.py`)."""

Profile: TypeAlias = tuple[int, list[object]]
"""What a message carries for a profile: the options of the recording, and events for the root."""

ReplyCallback: TypeAlias = "Callable[[list[WireMessage], Profile | None], None]"
"""Sends the messages for a peer, and an optional profile, as the reply to a request of that peer."""


class ActivePass(Protocol):
    """A backward pass at this worker (`passes/task.py`)."""

    @property
    def is_idle(self) -> bool:
        """Whether the pass expects no further messages."""

    def on_messages(self, peer: int, messages: list[WireMessage], reply: ReplyCallback | None = None) -> None:
        """Process messages of a peer, and reply with those for the peer."""

    def on_profile(self, profile: Profile) -> None:
        """Process the profile that a message carried."""

    def peer_lost(self, peer: int, why: str) -> None:
        """Process the loss of a worker."""

    def abort(self, error: BaseException) -> None:
        """End the pass with an error."""


class Sent(NamedTuple):
    """A sent message with tensors: where their gradients enter the local graph."""

    id: int
    """Of the message, the same on both sides: `worker id << 48 | counter`, with the sender's worker id."""
    peer: int
    """Worker id of the receiver; this worker's for a call to itself."""
    edges: tuple[GradientEdge | Tensor | None, ...]
    """For each tensor of the message, in order: its gradient edge when it was sent, for a leaf the leaf itself; None
    for a tensor that required no gradient."""
    owners: tuple[Node, ...] = ()
    """Nodes that keep the graph behind the edges alive: nodes of Python functions do not."""
    epoch: int = 0
    """Of a request: epoch of the messages to the receiver. Other messages belong to the session of their request."""


class Received(NamedTuple):
    """A received message with tensors: where gradients leave the local graph."""

    id: int
    """Of the message: that of the sender's `Sent`."""
    peer: int
    """Worker id of the sender; this worker's for a call to itself."""
    node: Node
    """The recv: the node of the tensors of the message. The local graph ends at it; only stages with parameters under
    DistributedDataParallel run it (`grad_capture.py`). Its only edge leads to an anchor. It must keep its identity:
    hold the very object that `tensor.grad_fn` returns."""
    outputs: int
    """Number of gradients that it reports: one per tensor of the message, in order. Output k of `node` is tensor k; for
    a tensor that requires no gradient it reports None."""


class Context:
    """Part of an autograd context on this worker; `lock` guards its tables.

    Args:
        id: `worker id << 48 | counter`, of the worker that opened it.
    """

    __slots__ = (
        *(
            "ended",
            "gradients",
            "id",
            "lock",
            "lost_incarnation",
            "lost_sends",
            "lost_worker",
            "min_live_pass",
            "passes",
            "receipts",
        ),
        *("requests_received", "requests_sent", "sends", "sent_in"),
    )

    is_plain: bool = False
    """Whether this is a worker's record of messages outside of contexts (`plain/records.py`)."""

    def __init__(self, id: int) -> None:
        self.id: int = id
        self.sends: dict[int, Sent] = {}
        self.receipts: dict[int, Received] = {}
        self.gradients: dict[Tensor, Tensor] = {}
        """Leaf to its gradient, by identity of the leaf; same shape and dtype as the leaf, dense or sparse."""
        self.ended: bool = False
        """An ended context records no tensors and begins no pass."""
        self.lost_worker: int | None = None
        """Id of a worker, if its loss has ended the context. The root may still need what would be recorded here."""
        self.lost_incarnation: int = 0
        """Incarnation of `lost_worker`; 0 if it is not known."""
        self.lost_sends: dict[int, tuple[str, int]] = {}
        """Messages without a record since a loss -> name and incarnation of the lost worker.

        Their gradients may still arrive.
        """
        self.lock: threading.Lock = threading.Lock()
        self.requests_sent: dict[int, int] = {}
        """Worker id -> requests sent to it in this context. These workers are notified when the context ends."""
        self.sent_in: dict[int, int] = {}
        """Worker id -> epoch of `requests_sent`. The end of a session begins the next one, and so does a return."""
        self.requests_received: dict[int, int] = {}
        """Worker id -> requests received from it in this context."""
        self.passes: dict[tuple[int, int], ActivePass] = {}
        """(Root, number of the pass at the root) -> backward pass, until the root reports a later minimum."""
        self.min_live_pass: dict[int, int] = {}
        """Root -> the lowest number of its passes that may still be running."""

    def why_unknown(self, message: int) -> UnknownSend | WorkerLost:
        """Return the error of a gradient for a message without a record."""
        lost = self.lost_sends.get(message)
        if lost is not None:
            name, incarnation = lost
            why = f"so the records of its messages in autograd context {self.id} are gone"
            return WorkerLost(name, why, incarnation)
        return UnknownSend(message, "no record at this worker, or was sent after backward began")
