"""The short way of a pass: what most workers do in most passes, without the schedule.

Most often a worker's part in a pass is one stage, and its gradients come from and go to one other worker: a trainer
whose loss begins at the replies of a server; the server that answers. Then there is nothing to schedule: `begin` runs
the root's stage, `answer` another worker's, and what is to be said to the peer is known at once. Each says what the
schedule (`telegrad.protocols.backward.Part`) would, to the letter.

As soon as anything else happens than what is most likely (another worker's message, a loss, a wave of marks), the pass
goes on at length: `Asked.replay` and `Answered.replay` bring a `Part` to where the short way has come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad.autograd.ddp import are_reduced
from telegrad.autograd.deep import Descent
from telegrad.autograd.engine import run_engine, run_to_the_ends
from telegrad.autograd.leaves import ALONE, ALONE_IN_TUPLE, land, references, total_of
from telegrad.autograd.local import Local
from telegrad.autograd.reaching import Found, Reaching, vain
from telegrad.protocols.backward import Part
from telegrad.protocols.backward_messages import FINAL, ROOT, Gradients, Layout, Run, TokenKind

if TYPE_CHECKING:
    from telegrad.autograd.context import Context, Received, Sent

__all__ = ["Answered", "Asked", "answer", "begin"]

_GRADIENT = int(TokenKind.GRADIENT)
_new = tuple.__new__
_REST = (None,) * (len(GradientEdge._fields) - 2)


def _run(
    context: Context, outputs: list[Any], grads: list[Tensor], found: Found, retain_graph: bool
) -> list[Tensor | None]:
    """Runs what leads to these leaves and recvs. The leaves' gradients go to the context; those of the recvs are
    returned. `grads` is emptied: nothing here holds a gradient that leaves are to keep."""
    leaves, recvs, to_the_ends = found
    if to_the_ends:
        tensors: list[Tensor | None] = []
        taken = run_to_the_ends(recvs, outputs, grads, retain_graph)
        for received in recvs:
            tensors += taken[received.node] or (None,) * received.outputs
        return tensors
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
    captured = run_engine(tuple(outputs), given, tuple(inputs), retain_graph)
    del given
    if leaves:
        place = reported
        for leaf in leaves:
            grad = captured[place]
            if grad is not None:
                alone = references(grad) <= ALONE_IN_TUPLE
                land(context, leaf, grad, alone)
            place += 1
    return list(captured[:reported])


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
        walked: how many nodes there are.
    """

    __slots__ = ("_entries", "_receipts", "_retain_graph", "_roots", "_vain", "_walked", "consumed", "me", "peer")

    def __init__(
        self,
        me: int,
        peer: int,
        sent: tuple[int, ...],
        entries: dict[int, tuple[Sent, list[Tensor]]],
        receipts: list[Received],
        roots: Sequence[Tensor],
        retain_graph: bool,
        walked: int,
    ) -> None:
        self.me: int = me
        self.peer: int = peer
        self.consumed: tuple[tuple[int, int], ...] = tuple([(_GRADIENT, send) for send in sent])
        self._entries = entries
        self._receipts = receipts
        self._roots = roots
        self._retain_graph = retain_graph
        self._walked = walked
        self._vain = vain.here  # another thread may go on

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
            _run(context, outputs, grads, Found(leaves, [], False), self._retain_graph)

    def was_in_vain(self) -> None:
        """There is more to be done, and the graph has to be walked again."""
        self._vain.note(self._walked)

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
    in_vain = vain.here
    if not in_vain.may_walk():
        return None
    receipts = list(context.receipts.values())
    sends = list(context.sends.values())
    with Descent() as descent:
        reach = Reaching(receipts, descent)
        led = _root_leads_to(reach, me, roots, sends)
    walked = reach.walked
    if led is None:
        in_vain.note(walked)
        return None
    del reach  # which holds the nodes
    found, entries = led
    grads = [torch.ones_like(root) for root in roots]
    tensors = _run(context, list(roots), grads, found, retain_graph)
    ids = tuple([received.id for received in found.recvs])
    peer = found.recvs[0].peer
    return Asked(me, peer, ids, entries, receipts, roots, retain_graph, walked), ids, tensors


def _root_leads_to(
    reach: Reaching, me: int, roots: Sequence[Tensor], sends: Sequence[Sent]
) -> tuple[Found, dict[int, tuple[Sent, list[Tensor]]]] | None:
    """What the roots lead to, and what was sent from here; None if that is not short."""
    found = reach.of(ROOT, [root.grad_fn for root in roots])
    if found is None or not found.recvs or are_reduced(found.leaves):
        return None
    peer = found.recvs[0].peer
    if peer == me or any(received.peer != peer for received in found.recvs):
        return None
    entries: dict[int, tuple[Sent, list[Tensor]]] = {}
    for sent in sends:
        below = reach.of_sent(sent)
        if below is None or are_reduced(below):
            return None
        entries[sent.id] = sent, below
    return found, entries


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
        self.peer: int = peer
        self.send: int = send
        self.reported: tuple[tuple[int, int], ...] = reported
        self.ran: bool = False

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
    in_vain = vain.here
    if len(sends) != 1 or sends[0].id != send or not in_vain.may_walk():
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
    with Descent() as descent:
        reach = Reaching(list(context.receipts.values()), descent)
        found = reach.of(send, starts)
    if found is None or any(received.peer != root for received in found.recvs) or are_reduced(found.leaves):
        in_vain.note(reach.walked)
        return None
    del reach
    reported = tuple([(received.id, root) for received in found.recvs])
    produced = tuple([((_GRADIENT, number), root) for number, _ in reported])
    del grad
    tensors.clear()
    back = _run(context, outputs, grads, found, retain_graph)
    return Answered(root, send, reported), back, (1, ((_GRADIENT, send),), produced, False, False)
