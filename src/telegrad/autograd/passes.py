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
from telegrad.autograd.short import Answered, Asked, answer, begin
from telegrad.errors import TEXT, RemoteError, WorkerLost, is_drop_in
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
from telegrad.serialize.tracebacks import text_of
from telegrad.types import WorkerInfo

__all__ = ["Pass"]

logger: logging.Logger = logging.getLogger("telegrad")

GRADIENTS, MARK, MARKED, FINISH, REPORT, FAILED, LOST, ABORT = range(8)


Failure = tuple[int, bytes, str]  # worker id, packed exception, its text


_NOTHING = Local(Context(0))  # what is held of the local graph on the short way


class Pass:
    """One worker's part in one call of `backward`.

    Its methods never block but for the local engine (and DDP's reductions in it), which runs hooks and functions of the
    user; none raises. They must be called one at a time; which thread does not matter. `send` and `finished` are called
    from inside them only.

    Args:
        me: this worker.
        context: what was recorded here. Its `gradients` are added to.
        number: of the pass among the root's, for messages in logs.
        root_worker: the id of the worker that called `backward`.
        send: takes (a worker id, a message); at once, or later, but never to be lost without `peer_lost`. What it
            raises fails the pass. Tensors must be taken up (copied, or held) before it returns, and not be written to.
        finished: at the root only, and once: the pass is over, with None or the error that `backward` is to raise. All
            gradients are then in the contexts of their workers.
        name_of: a worker's name by its id, for errors.
    """

    _short: Asked | Answered | None = None  # what has been done on the short way
    _short_over = False  # at the root: nothing else was to be done
    _cause: BaseException | None = None  # at the root: of the error that it raises, if it was its own
    # On the long way:
    _part: Part | None = None
    _local = _NOTHING
    _reported: dict[int, Sequence[Tensor | None]]  # recv -> gradients, from its stage to their sending

    def __init__(
        self,
        me: WorkerInfo,
        context: Context,
        number: int,
        root_worker: int,
        send: Callable[[tuple[int, tuple[Any, ...]]], None],
        finished: Callable[[BaseException | None], None],
        name_of: Callable[[int], str] = str,
    ) -> None:
        self._number = number
        self._me = me
        self._context = context
        self._send = send
        self._finished = finished
        self._name_of = name_of
        self._root = root_worker

    # ---- events ------------------------------------------------------------------------------------------------------

    def start(self, roots: Sequence[Tensor], retain_graph: bool) -> None:
        """At the root: begins, with a gradient of one at each of the roots: real scalars that require grad."""
        try:
            begun = begin(self._me.id, self._context, roots, retain_graph)
            if begun is not None:
                self._short, sends, tensors = begun
                self._send((self._short.peer, (GRADIENTS, retain_graph, False, sends, tensors, None)))
                return
        except BaseException as error:
            self._fail(error)
            return
        self._guarded(self._start, roots, retain_graph)

    def on_message(self, peer: int, message: tuple[Any, ...]) -> None:
        """A message that `send` of the worker `peer` was given. Also after the end: some are late."""
        if self._part is None:
            try:
                if self._is_short(peer, message):
                    return
            except BaseException as error:
                self._fail(error, self._handle)
                return
        self._guarded(self._handle, peer, message)

    def peer_lost(self, peer: int, why: str) -> None:
        """Worker `peer` is gone; tell it for every peer that is lost while the context lives."""
        if not self._short_over:
            self._guarded(self._lost, peer, why)

    def abort(self, error: BaseException) -> None:
        """Ends the pass with this error, which at the root goes to `finished`: time is up, or the worker shuts down."""
        if not self._short_over:
            self._guarded(self._abort, error)

    @property
    def key(self) -> tuple[int, int]:
        """Of its context, and its number."""
        return self._context.id, self._number

    # ---- what it knows -----------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """At the root: `finished` was called. Elsewhere: it has failed; a part that went well waits for the root's
        word, which need not come."""
        return self._short_over if self._part is None else self._part.over is not None

    @property
    def busy(self) -> bool:
        """Something is held for it here: the local graph."""
        return self._local.held or type(self._short) is Asked

    @property
    def idle(self) -> bool:
        """Nothing is expected to arrive any more, and the local graph is let go of. A root waits for reports to the
        end, though nothing may be left for it to run."""
        if self._root == self._me.id:
            return self.over
        if self._part is None:
            return type(self._short) is Answered
        return self._part.over is not None or (self._part.complete and not self._local.held)

    def waiting_for(self) -> str:
        """At the root: what is outstanding, and where, for the error of a time-out."""
        words = {TokenKind.GRADIENT: "gradients", TokenKind.MARK: "marks"}
        found: dict[tuple[int, str], int] = {}
        short, part = self._short, self._part
        if part is None:
            if type(short) is Asked:
                found[short.peer, words[TokenKind.GRADIENT]] = len(short.consumed)
        elif part.ledger is not None and not self.over:
            for kind, number in part.ledger.outstanding:
                what = words.get(TokenKind(kind), "its report")
                worker = part.ledger.where.get((kind, number), -1)
                found[worker, what] = found.get((worker, what), 0) + 1
        rows = [
            f"worker {self._name_of(worker) if worker >= 0 else '(not heard of yet)'}: {count} x {what}"
            for (worker, what), count in sorted(found.items())
        ]
        return "; ".join(rows) if rows else "nothing"

    # ---- the short way -----------------------------------------------------------------------------------------------

    def _is_short(self, peer: int, message: tuple[Any, ...]) -> bool:
        """Takes a message up, if that is all that there is to do; else nothing has been done."""
        if self._short_over:  # it is late
            return True
        short = self._short
        kind = message[0]
        if self._root == self._me.id:
            if not isinstance(short, Asked):
                return False
            sends: Sequence[int] = ()
            tensors: list[Tensor | None] = []
            if kind == GRADIENTS:
                _, _, marked, sends, tensors, report = message
                if marked or report is None:
                    return False
            elif kind == REPORT:
                report = message[1]
            else:
                return False
            if not short.is_last(peer, sends, report):
                return False
            short.finish(self._context, sends, tensors)
            tensors.clear()
            self._short = None
            self._short_over = True
            self._finished(None)
            return True
        if short is not None or kind != GRADIENTS or peer != self._root:
            return False
        _, retain_graph, marked, sends, tensors, _ = message
        if marked or len(sends) != 1:
            return False
        answered = answer(self._context, peer, sends[0], tensors, retain_graph)
        if answered is None:
            return False
        self._short, found, report = answered
        if self._short.reported:
            ids = tuple([number for number, _ in self._short.reported])
            self._send((peer, (GRADIENTS, retain_graph, False, ids, found, report)))
        else:
            self._send((peer, (REPORT, report)))
        return True

    def _at_length(self) -> Part:
        """The schedule, at the point which the short way has come to."""
        part = self._part
        if part is None:
            short, self._short = self._short, None
            local = Local(self._context)
            if isinstance(short, Answered):
                local.close()
                part = Part(self._me.id, self._root, short.layout, short.pending)
                short.replay(part)
            else:
                part = Part(self._me.id, self._root, local.layout, local.pending)
                if short is not None:
                    short.replay(part, local)
            self._part, self._local, self._reported = part, local, {}
        return part

    # ---- the schedule ------------------------------------------------------------------------------------------------

    def _guarded(self, event: Callable[..., Sequence[Effect]], *args: Any) -> None:
        try:
            self._carry_out(event(*args))
        except BaseException as error:  # of hooks, functions, the engine, or of sending: the pass has failed
            self._fail(error, event)
        self._tidy()

    def _fail(self, error: BaseException, event: Any = None) -> None:
        try:
            part = self._at_length()
            self._carry_out(part.failed(self._failure(error, event)))
        except BaseException:
            logger.exception("backward pass %s: worker %s cannot tell that it failed", self.key, self._me.name)
        self._tidy()

    def _tidy(self) -> None:
        part = self._part
        if self._local.held and part is not None and (part.over is not None or part.complete):
            self._local.close()
            self._reported.clear()

    def _lost(self, peer: int, why: str) -> Sequence[Effect]:
        return self._at_length().lost(peer, (peer, why))

    def _abort(self, error: BaseException) -> Sequence[Effect]:
        return self._at_length().abort(self._failure(error))

    def _start(self, roots: Sequence[Tensor], retain_graph: bool) -> Sequence[Effect]:
        part = self._at_length()
        self._local.retain_graph = retain_graph
        self._local.roots = [get_gradient_edge(root) for root in roots]
        self._local.stages().add(ROOT, [torch.ones_like(root) for root in roots])
        return part.start()

    def _handle(self, peer: int, message: tuple[Any, ...]) -> Sequence[Effect]:
        if type(self._short) is Asked and message[0] not in (FAILED, LOST):
            self._short.was_in_vain()
        part = self._at_length()
        if message[0] == GRADIENTS:
            _, retain_graph, marked, sends, tensors, report = message
            if part.over is None:
                self._local.retain_graph = retain_graph
                stages = self._local.stages()
                place = 0
                for send in sends:
                    place = stages.add(send, tensors, place)
            tensors.clear()  # they are in the stages now, and nobody else's
            return part.handle(peer, Gradients(sends, marked, report and _report(report)))
        return part.handle(peer, _received(message))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        while effects:
            for effect in effects:
                if isinstance(effect, Send):
                    self._send((effect.to, self._wire(effect.message)))
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
        return self._at_length().ran(stage)

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
        root, after its own first stage, is told of as if it came from elsewhere; but for what is no `Exception`: what
        a signal handler raises (KeyboardInterrupt) must not look like an error of the pass."""
        if self._root == self._me.id:
            if event != self._handle or not isinstance(error, Exception):
                return error
            self._cause = error
        return self._me.id, pack_exception(error, self._me), text_of(error)

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
        if isinstance(error, RemoteError) and is_drop_in():
            error.__dict__[TEXT] = f"Error on Node {worker}: {text}\n{error.__dict__[TEXT]}"
        return error


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
