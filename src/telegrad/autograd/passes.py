"""One backward pass at one worker: the schedule (protocols/backward.py) at the wheel of the local stages.

A message of a pass is a plain tuple that begins with its kind, an int; it holds ints, bytes, texts, tuples of them, and
in `GRADIENTS` a list of tensors and None.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd.context import Context
from telegrad.autograd.local import Local
from telegrad.errors import RemoteError, WorkerLost
from telegrad.protocols.backward import Part
from telegrad.protocols.backward_messages import (
    ROOT,
    Abort,
    Dropped,
    Effect,
    Failed,
    Finish,
    Finished,
    Gradients,
    Lost,
    Mark,
    Marked,
    Message,
    Report,
    Run,
    Send,
    TokenKind,
)
from telegrad.serialize.exceptions import pack_exception, unpack_exception
from telegrad.types import WorkerInfo

__all__ = ["Pass"]

logger = logging.getLogger("telegrad")

GRADIENTS, MARK, MARKED, FINISH, REPORT, FAILED, LOST, ABORT = range(8)

Failure = tuple[int, bytes, str]  # worker id, packed exception, its text


class Pass:
    """One worker's part in one call of `backward`.

    Its methods never block but for the local engine (and DDP's reductions in it), which runs hooks and functions of the
    user; none raises. They must be called one at a time; which thread does not matter. `send` and `finished` are called
    from inside them only.

    Args:
        me: this worker.
        context: what was recorded here. Its `gradients` are added to.
        key: (context id, number of the pass in it), for messages in logs.
        root_worker: the id of the worker that called `backward`.
        send: takes a worker id and a message; at once, or later, but never to be lost without `peer_lost`. What it
            raises fails the pass. Tensors must be taken up (copied, or held) before it returns, and not be written to.
        finished: at the root only, and once: the pass is over, with None or the error that `backward` is to raise. All
            gradients are then in the contexts of their workers.
        name_of: a worker's name by its id, for errors.
    """

    def __init__(
        self,
        me: WorkerInfo,
        context: Context,
        key: tuple[int, int],
        root_worker: int,
        send: Callable[[int, tuple[Any, ...]], None],
        finished: Callable[[BaseException | None], None],
        name_of: Callable[[int], str] = str,
    ) -> None:
        self.key = key
        self._me = me
        self._context = context
        self._send = send
        self._finished = finished
        self._name_of = name_of
        self._cause: BaseException | None = None  # at the root: of the error that it raises, if it was its own
        self._local = Local(context)
        self._reported: dict[int, Sequence[Tensor | None]] = {}  # recv -> gradients, from its stage to their sending
        self._part = Part(me.id, root_worker, self._local.layout, self._local.pending)

    # ---- events ------------------------------------------------------------------------------------------------------

    def start(self, roots: Sequence[Tensor], retain_graph: bool) -> None:
        """At the root: begins, with a gradient of one at each of the roots: real scalars that require grad."""
        self._local.retain_graph = retain_graph
        self._guarded(self._start, roots)

    def on_message(self, peer: int, message: tuple[Any, ...]) -> None:
        """A message that `send` of the worker `peer` was given. Also after the end: some are late."""
        self._guarded(self._handle, peer, message)

    def peer_lost(self, peer: int, why: str) -> None:
        """Worker `peer` is gone; tell it for every peer that is lost while the context lives."""
        self._guarded(self._part.lost, peer, (peer, why))

    def abort(self, error: BaseException) -> None:
        """Ends the pass with this error, which at the root goes to `finished`: time is up, or the worker shuts down."""
        self._guarded(self._part.abort, self._failure(error))

    # ---- what it knows -----------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """At the root: `finished` was called. Elsewhere: it has failed; a part that went well waits for the root's
        word, which need not come."""
        return self._part.over is not None

    @property
    def busy(self) -> bool:
        """Something is held for it here: the local graph."""
        return self._local.held

    @property
    def idle(self) -> bool:
        """Nothing is expected to arrive any more, and the local graph is let go of."""
        return self._part.over is not None or (self._part.complete and not self._local.held)

    def waiting_for(self) -> str:
        """At the root: what is outstanding, and where, for the error of a time-out."""
        ledger = self._part.ledger
        if ledger is None or self.over:
            return "nothing"
        words = {TokenKind.GRADIENT: "gradients", TokenKind.MARK: "marks"}
        found: dict[tuple[int, str], int] = {}
        for kind, number in ledger.outstanding:
            what = words.get(TokenKind(kind), "its report")
            worker = ledger.where.get((kind, number), -1)
            found[worker, what] = found.get((worker, what), 0) + 1
        return "; ".join(
            f"worker {self._name_of(worker) if worker >= 0 else '(not heard of yet)'}: {count} x {what}"
            for (worker, what), count in sorted(found.items())
        )

    # ---- the schedule ------------------------------------------------------------------------------------------------

    def _guarded(self, event: Callable[..., Sequence[Effect]], *args: Any) -> None:
        try:
            self._carry_out(event(*args))
        except BaseException as error:  # of hooks, functions, the engine, or of sending: the pass has failed
            try:
                self._carry_out(self._part.failed(self._failure(error, event)))
            except Exception:
                logger.exception("backward pass %s: worker %s cannot tell that it failed", self.key, self._me.name)
        if self._local.held and (self._part.over is not None or self._part.complete):
            self._local.close()
            self._reported.clear()

    def _start(self, roots: Sequence[Tensor]) -> Sequence[Effect]:
        self._local.roots = [get_gradient_edge(root) for root in roots]
        self._local.stages().add(ROOT, [torch.ones_like(root) for root in roots])
        return self._part.start()

    def _handle(self, peer: int, message: tuple[Any, ...]) -> Sequence[Effect]:
        kind = message[0]
        if kind == GRADIENTS:
            _, retain_graph, marked, sends, tensors, report = message
            if self._part.over is None:
                self._local.retain_graph = retain_graph
                stages = self._local.stages()
                place = 0
                for send in sends:
                    place = stages.add(send, tensors, place)
            tensors.clear()  # they are in the stages now, and nobody else's
            return self._part.handle(peer, Gradients(sends, marked, report and _report(report)))
        return self._part.handle(peer, _received(message))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        while effects:
            for effect in effects:
                if isinstance(effect, Send):
                    self._send(effect.to, self._wire(effect.message))
            last = effects[-1]
            effects = ()
            if isinstance(last, Run):
                effects = self._run(last.stage)
            elif isinstance(last, Finished):
                self._finished(None if last.why is None else self._error(last.why))
            elif isinstance(last, Dropped):
                logger.debug("backward pass %s: dropped by worker %s: %s", self.key, self._me.name, last.why)

    def _run(self, stage: int) -> Sequence[Effect]:
        stages = self._local.stages()
        reports = stages.run(stage)
        self._reported.clear()
        for received, grads in reports:
            if received.peer == self._me.id:
                stages.add(received.id, grads)
            else:
                self._reported[received.id] = grads
        del reports
        return self._part.ran(stage)

    def _wire(self, message: Message) -> tuple[Any, ...]:
        if isinstance(message, Gradients):
            tensors: list[Tensor | None] = []
            for send in message.sends:
                tensors += self._reported.pop(send)
            report = message.report and tuple(message.report)
            return GRADIENTS, self._local.retain_graph, message.marked, message.sends, tensors, report
        if isinstance(message, Report):
            return REPORT, tuple(message)
        if isinstance(message, Mark):
            return MARK, message.sends
        if isinstance(message, Failed):
            return FAILED, message.why
        if isinstance(message, Lost):
            return LOST, message.peer, message.why
        if isinstance(message, Abort):
            return ABORT, str(self._error(message.why))
        return (MARKED,) if isinstance(message, Marked) else (FINISH,)

    # ---- errors ------------------------------------------------------------------------------------------------------

    def _failure(self, error: BaseException, event: Any = None) -> Any:
        """What travels of an error; the error itself where it need not. As in torch, what a message has led to at the
        root, after its own first stage, is told of as if it came from elsewhere."""
        if self._part.ledger is not None:
            if event != self._handle:
                return error
            self._cause = error
        return self._me.id, pack_exception(error, self._me), _text(error)

    def _error(self, why: Any) -> BaseException:
        """The error that `backward` raises."""
        if isinstance(why, BaseException):
            return why
        if isinstance(why, str):
            return RuntimeError(why)
        if len(why) == 2:
            peer, reason = why
            return WorkerLost(self._name_of(peer), reason)
        worker, packed, text = why
        error = unpack_exception(packed)
        if self._cause is not None and worker == self._me.id:
            error.__cause__ = self._cause
        if isinstance(error, RemoteError):
            error._text = f"Error on Node {worker}: {text}\n{error._text}"
        return error


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return type(error).__name__


def _report(plain: Sequence[Any]) -> Report:
    return Report(*plain)


def _received(message: tuple[Any, ...]) -> Message:
    kind = message[0]
    if kind == REPORT:
        return _report(message[1])
    if kind == MARK:
        return Mark(message[1])
    if kind == MARKED:
        return Marked()
    if kind == FINISH:
        return Finish()
    if kind == FAILED:
        return Failed(message[1])
    if kind == LOST:
        return Lost(message[1], message[2])
    if kind == ABORT:
        return Abort(message[1])
    raise ValueError(f"unknown kind of message of a backward pass: {kind!r}")
