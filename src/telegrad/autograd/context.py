"""What one worker has recorded in one autograd context: the tensors it sent, the tensors it received, the gradients.

Data only. `recording.py` fills it while the forward pass runs; a `Pass` reads it while `backward` runs and adds to
`gradients`. Nothing in here keeps the data of a sent tensor alive: an edge holds the node that made the tensor.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import GradientEdge, Node

    from telegrad.autograd.running import Running


@dataclass(slots=True, frozen=True, eq=False)
class Sent:
    """A message of mine that carried tensors: where the gradients that come back for it enter my graph."""

    id: int
    """Of the message, the same on both sides: `worker id << 48 | counter`, the sender's worker id."""
    peer: int
    """Worker id of the receiver; my own for a call to myself."""
    edges: tuple[GradientEdge | None, ...]
    """For each tensor of the message, in its order, the edge taken as it was sent; None if it required no gradient."""
    owners: tuple[Node, ...] = ()
    """Nodes that keep the graph behind the edges alive: torch does not let the nodes of Python functions do it."""


@dataclass(slots=True, frozen=True, eq=False)
class Received:
    """A message that brought me tensors: where gradients leave my graph."""

    id: int
    """Of the message: that of the sender's `Sent`."""
    peer: int
    """Worker id of the sender; my own for a call to myself."""
    node: Node
    """The recv: the node of the tensors made from the message. It is the graph's end here and never runs, except
    beside DDP-managed parameters; the only edge it may have is to an anchor. It must keep its identity: hold the
    very object that `tensor.grad_fn` gives."""
    outputs: int
    """How many gradients it reports: one per tensor of the message, in its order. Output k of `node` is tensor k;
    a tensor that requires no gradient has its place too (None is reported for it)."""


@dataclass(slots=True, eq=False)
class Context:
    """One worker's part of one autograd context. Guard changes of its tables with `lock`."""

    id: int
    """`worker id << 48 | counter`, of the worker that opened it."""
    sends: dict[int, Sent] = field(default_factory=dict)
    receipts: dict[int, Received] = field(default_factory=dict)
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    """Leaf to its gradient, by identity of the leaf; same shape and dtype as the leaf, dense or sparse."""
    ended: bool = False
    """It was left: nothing is recorded in it, no pass begins in it."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: dict[int, int] = field(default_factory=dict)
    """By worker: how many requests I have sent it in this context. They are to be told when it ends."""
    heard: dict[int, int] = field(default_factory=dict)
    """By worker: how many requests have come from it in this context."""
    passes: dict[tuple[int, int], Running] = field(default_factory=dict)
    """Backward passes, by (root, number among those of the root): what has not been forgotten here yet."""
    passes_over: dict[int, int] = field(default_factory=dict)
    """By root: all its passes with a lower number are over."""
