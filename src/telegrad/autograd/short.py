"""The short way of a pass: what most workers do in most passes, without the schedule.

Most often a worker's part in a pass is one stage, and its gradients come from and go to one other worker: a trainer
whose loss begins at the replies of a server; the server that answers. Then there is nothing to schedule: `begin` runs
the root's stage, `answer` another worker's, and what is to be said to the peer is known at once. Each says what the
schedule (`telegrad.protocols.backward.Part`) would, to the letter.

As soon as anything else happens than what is most likely (another worker's message, a loss, a wave of marks), the pass
goes on at length: `Asked.replay` and `Answered.replay` bring a `Part` to where the short way has come to.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad._core import Reach
from telegrad.autograd.ddp import are_reduced
from telegrad.autograd.graph import LEAF, kinds
from telegrad.autograd.leaves import ALONE, ALONE_IN_TUPLE, land, references, total_of
from telegrad.autograd.local import Local
from telegrad.autograd.stages import run_engine
from telegrad.protocols.backward import Part
from telegrad.protocols.backward_messages import FINAL, ROOT, Gradients, Layout, Run, TokenKind

if TYPE_CHECKING:
    from telegrad.autograd.context import Context, Received, Sent

__all__ = ["Answered", "Asked", "answer", "begin"]

_GRADIENT = int(TokenKind.GRADIENT)
_MOST_NODES = 400  # a walk of more has to take care (see deep.py), and takes so long that the schedule does not count
_SKIPPED = 15  # passes after one with so many nodes, which are not walked in vain before
_new = tuple.__new__
_REST = (None,) * (len(GradientEdge._fields) - 2)

Found = tuple[list[Tensor], list["Received"]]  # leaves and recvs


class _Large(threading.local):
    """What this thread has lately walked.

    Attributes:
        passes: that the short way is still not tried for.
    """

    passes = 0


_large = _Large()


def _is_likely_short() -> bool:
    if _large.passes == 0:
        return True
    _large.passes -= 1
    return False


class _Reach:
    """What the sources lead to, each to something of its own."""

    __slots__ = ("_leaves", "_nodes", "_recvs")

    def __init__(self, receipts: Sequence[Received]) -> None:
        self._nodes = Reach(kinds, _MOST_NODES)
        self._leaves: dict[int, int] = {}  # a leaf's identity -> the source from which it was reached
        self._recvs: dict[Any, Received] = {}
        for received in receipts:
            self._recvs[received.node] = received

    def of(self, source: int, starts: list[Any]) -> Found | None:
        """All leaves and recvs that these nodes, and leaves, lead to. None: there are too many nodes, another source
        leads to one of them, or one is a value that was received in another context."""
        ends = self._nodes.walk(starts, source)
        if ends is None:
            if self._nodes.inner > _MOST_NODES:
                _large.passes = _SKIPPED
            return None
        leaves: list[Tensor] = []
        recvs: list[Received] = []
        for node, _ in ends:
            if kinds[type(node)] == LEAF:
                leaf = node.variable
                if id(leaf) in self._leaves:
                    return None
                self._leaves[id(leaf)] = source
                leaves.append(leaf)
            else:
                received = self._recvs.get(node)
                if received is None:
                    return None
                recvs.append(received)
        if len(recvs) > 1:
            recvs.sort(key=_id)
        return leaves, recvs

    def of_sent(self, sent: Sent) -> list[Tensor] | None:
        """The leaves that a message's gradients lead to; None also if they lead to recvs, or a leaf that was sent
        requires no gradient by now."""
        source, leaves, starts = sent.id, [], []
        for edge in sent.edges:
            if isinstance(edge, Tensor):
                if not edge.requires_grad:
                    return None
                before = self._leaves.get(id(edge))
                if before is None:
                    self._leaves[id(edge)] = source
                    leaves.append(edge)
                elif before != source:
                    return None
            elif edge is not None:
                starts.append(edge.node)
        if starts:
            found = self.of(source, starts)
            if found is None or found[1]:
                return None
            leaves += found[0]
        return leaves


def _id(record: Any) -> int:
    number: int = record.id
    return number


def _run(
    context: Context,
    outputs: list[Any],
    grads: list[Tensor],
    leaves: list[Tensor],
    recvs: list[Received],
    retain_graph: bool,
) -> list[Tensor | None]:
    """Runs what leads to these leaves and recvs. The leaves' gradients go to the context; those of the recvs are
    returned. `grads` is emptied: nothing here holds a gradient that leaves are to keep."""
    inputs: list[Any] = []
    for received in recvs:
        for place in range(received.outputs):
            inputs.append(_new(GradientEdge, (received.node, place, *_REST)))
    reported = len(inputs)
    inputs += leaves
    if not outputs or not inputs:  # all gradients undefined; or nothing wants one
        return [None] * reported
    given = tuple(grads)
    grads.clear()
    found = run_engine(tuple(outputs), given, tuple(inputs), retain_graph)
    del given
    if leaves:
        place = reported
        for leaf in leaves:
            grad = found[place]
            if grad is not None:
                alone = references(grad) <= ALONE_IN_TUPLE
                land(context, leaf, grad, alone)
            place += 1
    return list(found[:reported])


def _land(context: Context, leaves: Sequence[Tensor | None], tensors: list[Tensor | None], place: int) -> None:
    """The gradients of leaves, which need no engine, from `place` on in `tensors`."""
    storages: set[int] = set()
    by_leaf: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for leaf in leaves:
        grad = tensors[place]
        tensors[place] = None
        place += 1
        if leaf is not None and grad is not None:
            if id(leaf) in by_leaf:
                by_leaf[id(leaf)][1].append(grad)
            else:
                by_leaf[id(leaf)] = leaf, [grad]
        del grad
    several = len(tensors) > 1
    for leaf, parts in by_leaf.values():
        if len(parts) > 1:
            total, alone = total_of(parts), True
        else:
            total = parts.pop()
            alone = references(total) <= ALONE
            if alone and several and total.layout is torch.strided:  # tensors of one message may share their memory
                storage = total.untyped_storage().data_ptr()
                alone = storage not in storages
                storages.add(storage)
        land(context, leaf, total, alone)


# ---- the root


class Asked:
    """The part of a root whose stage has run, and whose gradients are on their way to one worker.

    Args:
        sent: ids of the messages that they are for.
        entries: what was sent from here, with the leaves that each leads to.
        receipts: what was received here.
    """

    __slots__ = ("_entries", "_receipts", "_retain_graph", "_roots", "consumed", "me", "peer")

    def __init__(
        self,
        me: int,
        peer: int,
        sent: tuple[int, ...],
        entries: dict[int, tuple[Sent, list[Tensor]]],
        receipts: list[Received],
        roots: Sequence[Tensor],
        retain_graph: bool,
    ) -> None:
        self.me = me
        self.peer = peer
        self.consumed = tuple([(_GRADIENT, send) for send in sent])
        self._entries = entries
        self._receipts = receipts
        self._roots = roots
        self._retain_graph = retain_graph

    def is_last(self, peer: int, sends: Sequence[int], report: Any) -> bool:
        """Is the pass over with these gradients, and this report? It says that what was sent has been consumed, that
        the gradients which came with it are all that it led to, and that nothing is left over there."""
        event, consumed, produced, blocked, deferred = report
        if peer != self.peer or event != 1 or consumed != self.consumed or blocked or deferred:
            return False
        if len(produced) != len(sends) or len(set(sends)) != len(sends):
            return False
        for send, (token, to) in zip(sends, produced, strict=True):
            if to != self.me or token != (_GRADIENT, send) or send not in self._entries:
                return False
        return True

    def finish(self, context: Context, sends: Sequence[int], tensors: list[Tensor | None]) -> None:
        """Runs what these gradients lead to, which is leaves alone."""
        place = 0
        for send in sends:
            sent, leaves = self._entries[send]
            edges = sent.edges
            for edge in edges:
                if edge is not None and (not isinstance(edge, Tensor) or getattr(edge, "_backward_hooks", None)):
                    break
            else:
                _land(context, edges, tensors, place)  # type: ignore[arg-type]  # all are tensors, as the loop has seen
                place += len(edges)
                continue
            outputs: list[Any] = []
            grads: list[Tensor] = []
            for edge in edges:
                grad = tensors[place]
                tensors[place] = None
                place += 1
                if edge is not None and grad is not None:
                    outputs.append(edge)
                    grads.append(grad)
                del grad
            _run(context, outputs, grads, leaves, [], self._retain_graph)

    def replay(self, part: Part, local: Local) -> None:
        """Brings the schedule to where this has come to."""
        local.recorded = [sent for sent, _ in self._entries.values()], self._receipts
        local.roots = [get_gradient_edge(root) for root in self._roots]
        local.retain_graph = self._retain_graph
        stages = local.stages()
        stages.add(ROOT, [torch.ones_like(root) for root in self._roots])
        run = part.start()[-1]
        assert isinstance(run, Run)
        stages.skip(run.stage)
        part.ran(run.stage)


def begin(
    me: int, context: Context, roots: Sequence[Tensor], retain_graph: bool
) -> tuple[Asked, tuple[int, ...], list[Tensor | None]] | None:
    """Runs the stage of the root, if the rest is short: its gradients go to one worker, and what can come back leads to
    leaves that nothing else leads to. Else nothing has been done: None.

    Returns:
        The messages that there are gradients for, and the gradients.

    Raises:
        what hooks and functions raise.
    """
    if not _is_likely_short():
        return None
    receipts = list(context.receipts.values())
    sends = list(context.sends.values())
    reach = _Reach(receipts)
    starts: list[Any] = []
    grads: list[Tensor] = []
    for root in roots:
        starts.append(root.grad_fn)
        grads.append(torch.ones_like(root))
    reached = reach.of(ROOT, starts)
    if reached is None:
        return None
    leaves, recvs = reached
    if not recvs or recvs[0].peer == me or are_reduced(leaves):
        return None
    peer = recvs[0].peer
    ids: tuple[int, ...] = ()
    for received in recvs:
        if received.peer != peer:
            return None
        ids = (*ids, received.id)
    entries: dict[int, tuple[Sent, list[Tensor]]] = {}
    for sent in sends:
        below = reach.of_sent(sent)
        if below is None or are_reduced(below):
            return None
        entries[sent.id] = sent, below
    tensors = _run(context, list(roots), grads, leaves, recvs, retain_graph)
    return Asked(me, peer, ids, entries, receipts, roots, retain_graph), ids, tensors


# ---- other workers


class Answered:
    """The part of a worker that has had its one gradient, and has answered.

    Args:
        peer: the root, which has sent it.
        send: id of the message that it was for.
        reported: the recvs that it has led to: (id, sender) of each message.
    """

    __slots__ = ("peer", "ran", "reported", "send")

    def __init__(self, peer: int, send: int, reported: tuple[tuple[int, int], ...]) -> None:
        self.peer = peer
        self.send = send
        self.reported = reported
        self.ran = False

    def layout(self) -> Layout:
        return Layout({self.send: 0}, (), self.reported)

    def pending(self) -> bool:
        return not self.ran

    def replay(self, part: Part) -> None:
        """Brings a schedule, which has these two methods, to where this has come to."""
        assert part.handle(self.peer, Gradients((self.send,), False)) == [Run(FINAL)]
        self.ran = True
        part.ran(FINAL)


def answer(
    context: Context, root: int, send: int, tensors: list[Tensor | None], retain_graph: bool
) -> tuple[Answered, list[Tensor | None], Any] | None:
    """Runs what the gradient of a message to the root leads to, if that is the only message that was sent from here:
    then this is the final stage, and all goes back. Else nothing has been done: None.

    Args:
        tensors: one for each of its tensors. Emptied.

    Returns:
        The gradients for the messages of `Answered.reported`, and the report.

    Raises:
        what hooks and functions raise.
    """
    sends = list(context.sends.values())
    if len(sends) != 1 or sends[0].id != send or not _is_likely_short():
        return None
    starts: list[Any] = []
    outputs: list[Any] = []
    grads: list[Tensor] = []
    for edge, grad in zip(sends[0].edges, tensors, strict=True):
        if isinstance(edge, Tensor):
            return None
        if edge is not None:
            starts.append(edge.node)
            if grad is not None:
                outputs.append(edge)
                grads.append(grad)
    reached = _Reach(list(context.receipts.values())).of(send, starts)
    if reached is None:
        return None
    leaves, recvs = reached
    if are_reduced(leaves):
        return None
    reported: tuple[tuple[int, int], ...] = ()
    produced: tuple[Any, ...] = ()
    for received in recvs:
        if received.peer != root:
            return None
        reported = (*reported, (received.id, root))
        produced = (*produced, ((_GRADIENT, received.id), root))
    del grad
    tensors.clear()
    found = _run(context, outputs, grads, leaves, recvs, retain_graph)
    return Answered(root, send, reported), found, (1, ((_GRADIENT, send),), produced, False, False)
