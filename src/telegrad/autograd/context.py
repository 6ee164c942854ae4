"""The record of one worker in one autograd context: tensors sent, tensors received, gradients.

Data only. `recording.py` fills it while the forward pass runs. A `BackwardPass` reads it while `backward` runs, and
adds to `gradients`. Nothing in here keeps the data of a sent tensor alive: an edge holds the node that made the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import GradientEdge, Node


class ActivePass(Protocol):
    """A backward pass at this worker (`passes/task.py`)."""

    @property
    def idle(self) -> bool:
        """Whether it expects nothing more."""

    def messages(self, peer: int, messages: list[Any], answer: Callable[..., None] | None = None) -> None:
        """Process messages of a peer, and answer with those for the peer."""

    def arrived(self, profile: tuple[int, list[Any]]) -> None:
        """Process what a message has for a profile."""

    def peer_lost(self, peer: int, why: str) -> None:
        """Process the loss of a worker."""

    def abort(self, error: BaseException) -> None:
        """End the pass with an error."""


class Sent(NamedTuple):
    """A message of mine that carried tensors: where the gradients that come back for it enter my graph."""

    id: int
    """Of the message, the same on both sides: `worker id << 48 | counter`, the sender's worker id."""
    peer: int
    """Worker id of the receiver; my own for a call to myself."""
    edges: tuple[GradientEdge | Tensor | None, ...]
    """For each tensor of the message, in its order, the edge taken as it was sent, or of a leaf the leaf itself; None
    if it required no gradient."""
    owners: tuple[Node, ...] = ()
    """Nodes that keep the graph behind the edges alive: torch does not let the nodes of Python functions do it."""


class Received(NamedTuple):
    """A message that brought me tensors: where gradients leave my graph."""

    id: int
    """Of the message: that of the sender's `Sent`."""
    peer: int
    """Worker id of the sender; my own for a call to myself."""
    node: Node
    """The recv: the node of the tensors made from the message. The local graph ends there; only stages with parameters
    under DistributedDataParallel run it (`grad_capture.py`). Its only edge leads to an anchor. It must keep its
    identity: hold the very object that `tensor.grad_fn` returns."""
    outputs: int
    """How many gradients it reports: one per tensor of the message, in its order. Output k of `node` is tensor k;
    a tensor that requires no gradient has its place too (None is reported for it)."""


class Context:
    """One worker's part of one autograd context. Guard changes of its tables with `lock`.

    Args:
        id: `worker id << 48 | counter`, of the worker that opened it.
    """

    __slots__ = ("asked", "ended", "gradients", "heard", "id", "lock", "min_live_pass", "passes", "receipts", "sends")

    def __init__(self, id: int) -> None:
        self.id: int = id
        self.sends: dict[int, Sent] = {}
        self.receipts: dict[int, Received] = {}
        self.gradients: dict[Tensor, Tensor] = {}
        """Leaf to its gradient, by identity of the leaf; same shape and dtype as the leaf, dense or sparse."""
        self.ended: bool = False
        """It was left: nothing is recorded in it, no pass begins in it."""
        self.lock: threading.Lock = threading.Lock()
        self.asked: dict[int, int] = {}
        """By worker: how many requests I have sent it in this context. They are to be told when it ends."""
        self.heard: dict[int, int] = {}
        """By worker: how many requests have come from it in this context."""
        self.passes: dict[tuple[int, int], ActivePass] = {}
        """Backward passes, by (root, number among those of the root): what has not been forgotten here yet."""
        self.min_live_pass: dict[int, int] = {}
        """By root: all its passes with a lower number are over."""
