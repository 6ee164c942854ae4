"""One backward pass at one worker: the schedule (protocols/backward.py) at the wheel of the local stages.

A message of a pass is a plain tuple that begins with its kind, an int; it holds ints, bytes, texts, tuples of them, and
in `GRADIENTS` a list of tensors and None.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.execution.stages import Stages
from telegrad.errors import TEXT, RemoteError, WorkerLost, is_drop_in
from telegrad.protocols.backward import Part
from telegrad.protocols.backward_messages import (
    FINAL,
    ROOT,
    Abort,
    Dropped,
    Effect,
    Failed,
    Finish,
    Finished,
    Gradients,
    Layout,
    Lost,
    Mark,
    Marked,
    Message,
    Report,
    Run,
    Send,
    Token,
    TokenKind,
)
from telegrad.serialize.exceptions import pack_exception, unpack_exception
from telegrad.serialize.tracebacks import text_of
from telegrad.types import WorkerInfo

__all__ = ["BackwardPass"]

logger: logging.Logger = logging.getLogger("telegrad")

GRADIENTS, MARK, MARKED, FINISH, REPORT, FAILED, LOST, ABORT = range(8)


Failure = tuple[int, bytes, str]  # worker id, packed exception, its text
_GRADIENT = int(TokenKind.GRADIENT)


class BackwardPass:
    """One worker's part in one call of `backward`.

    Most workers have one stage to run, and send its gradients to one other worker, in most passes: a trainer that
    computes its loss from the replies of a server; the server. On this *fast path* the schedule's messages are known
    in advance, and the pass sends them without a schedule. On any other event, `_schedule` makes the schedule and has
    it catch up.

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

    _cause: BaseException | None = None  # at the root: of the error that it raises, if it was its own
    _part: Part | None = None
    _reported: dict[int, Sequence[Tensor | None]]  # recv -> gradients, from its stage to their sending
    # Without a schedule:
    _ran: int | None = None  # the source whose stage the fast path has run
    _produced: tuple[tuple[Token, int], ...] = ()  # by this stage, each with the worker that is to process it
    _ended = False  # at the root: nothing else was to be done

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
        self._stages = Stages(context)

    # ---- events ------------------------------------------------------------------------------------------------------

    def start(self, roots: Sequence[Tensor], retain_graph: bool) -> None:
        """At the root: begins, with a gradient of one at each of the roots: real scalars that require grad."""
        try:
            stages = self._stages
            stages.retain_graph = retain_graph
            graph = stages.open(roots)
            stages.add(ROOT, [torch.ones_like(root) for root in roots])
            peer = graph.single_peer(self._me.id)
            if peer is not None:
                sends, tensors = self._run_fast(ROOT, graph.bits[ROOT], peer)
                self._send((peer, (GRADIENTS, retain_graph, False, sends, tensors, None)))
                return
        except BaseException as error:
            self._fail(error)
            return
        self._guarded(self._start)

    def on_message(self, peer: int, message: tuple[Any, ...]) -> None:
        """A message that `send` of the worker `peer` was given. Also after the end: some are late."""
        if self._part is None:
            if self._ended:
                return
            try:
                handle = self._finish_fast if self._root == self._me.id else self._answer_fast
                if handle(peer, message):
                    return
            except BaseException as error:
                self._fail(error, self._handle)
                return
        self._guarded(self._handle, peer, message)

    def peer_lost(self, peer: int, why: str) -> None:
        """Worker `peer` is gone; tell it for every peer that is lost while the context lives."""
        if not self._ended:
            self._guarded(self._lost, peer, why)

    def abort(self, error: BaseException) -> None:
        """Ends the pass with this error, which at the root goes to `finished`: time is up, or the worker shuts down."""
        if not self._ended:
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
        return self._ended if self._part is None else self._part.over is not None

    @property
    def busy(self) -> bool:
        """Something is held for it here: the local graph."""
        return self._stages.graph is not None

    @property
    def idle(self) -> bool:
        """Nothing is expected to arrive any more, and the local graph is let go of. A root waits for reports to the
        end, though nothing may be left for it to run."""
        if self._root == self._me.id:
            return self.over
        if self._part is None:
            return self._ran is not None
        return self._part.over is not None or (self._part.complete and not self.busy)

    def waiting_for(self) -> str:
        """At the root: what is outstanding, and where, for the error of a time-out."""
        words = {TokenKind.GRADIENT: "gradients", TokenKind.MARK: "marks"}
        found: dict[tuple[int, str], int] = {}
        part = self._part
        if part is None:
            if self._produced and not self._ended:
                found[self._produced[0][1], words[TokenKind.GRADIENT]] = len(self._produced)
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

    # ---- the fast path -----------------------------------------------------------------------------------------------

    def _run_fast(self, source: int, stage: int, peer: int) -> tuple[tuple[int, ...], list[Tensor | None]]:
        """Run the stage of a source whose gradients all go to one worker.

        Returns:
            The messages that there are gradients for, and the gradients.
        """
        recvs, tensors = self._stages.run(stage)
        sends: list[int] = []
        produced: list[tuple[Token, int]] = []
        for received in recvs:
            sends.append(received.id)
            produced.append(((_GRADIENT, received.id), peer))
        self._produced = tuple(produced)
        self._ran = source
        return tuple(sends), tensors

    def _finish_fast(self, peer: int, message: tuple[Any, ...]) -> bool:
        """At the root: end the pass, if this message is the last; else do nothing and return False."""
        sends: Sequence[int] = ()
        tensors: list[Tensor | None] = []
        if message[0] == GRADIENTS:
            _, _, marked, sends, tensors, report = message
            if marked or report is None:
                return False
        elif message[0] == REPORT:
            report = message[1]
        else:
            return False
        stages = self._stages
        graph = stages.graph
        assert graph is not None
        # The last message reports that all gradients which were sent have been consumed, that as many were produced as
        # it brings, and that no work is left.
        event, consumed, produced, blocked, deferred = report
        if event != 1 or blocked or deferred or len(consumed) != len(self._produced) or len(produced) != len(sends):
            return False
        for token, awaited in zip(consumed, self._produced, strict=True):
            if (token, peer) != awaited:
                return False
        place = 0
        for send in sends:
            place = stages.add(send, tensors, place)
        tensors.clear()  # they are in the stages now, and nobody else's
        for send in sends:
            stages.run(graph.bits[send])
        stages.close()
        self._ended = True
        self._finished(None)
        return True

    def _answer_fast(self, peer: int, message: tuple[Any, ...]) -> bool:
        """At another worker: run everything, if this message brings all gradients and everything goes back to its
        sender; else run nothing and return False."""
        if message[0] != GRADIENTS or peer != self._root:
            return False
        _, retain_graph, marked, sends, tensors, _ = message
        stages = self._stages
        if marked or len(sends) != 1 or not stages.open().leads_back(sends[0], peer):
            return False
        stages.retain_graph = retain_graph
        stages.add(sends[0], tensors)
        tensors.clear()
        back, found = self._run_fast(sends[0], FINAL, peer)
        stages.close()
        report = (1, ((_GRADIENT, sends[0]),), self._produced, False, False)
        if back:
            self._send((peer, (GRADIENTS, retain_graph, False, back, found, report)))
        else:
            self._send((peer, (REPORT, report)))
        return True

    # ---- the schedule ------------------------------------------------------------------------------------------------

    def _schedule(self) -> Part:
        """Return the schedule. The first call makes it, and has it catch up with the fast path."""
        part = self._part
        if part is None:
            stages, source = self._stages, self._ran
            layout: Callable[[], Layout] = stages.layout
            if source is not None and source != ROOT:  # all has run, and the graph has been released
                recvs = tuple([(send, peer) for (_, send), peer in self._produced])
                layout = partial(Layout, {source: 0}, (), recvs)
            part = Part(self._me.id, self._root, layout, stages.pending)
            if source is not None:
                effects = part.start() if source == ROOT else part.handle(self._root, Gradients((source,), False))
                if isinstance(effects[-1], Run):
                    part.ran(effects[-1].stage)
            self._part, self._reported = part, {}
        return part

    def _guarded(self, event: Callable[..., Sequence[Effect]], *args: Any) -> None:
        try:
            self._carry_out(event(*args))
        except BaseException as error:  # of hooks, functions, the engine, or of sending: the pass has failed
            self._fail(error, event)
        self._tidy()

    def _fail(self, error: BaseException, event: Any = None) -> None:
        try:
            part = self._schedule()
            self._carry_out(part.failed(self._failure(error, event)))
        except BaseException:
            logger.exception("backward pass %s: worker %s cannot tell that it failed", self.key, self._me.name)
        self._tidy()

    def _tidy(self) -> None:
        part = self._part
        if self.busy and part is not None and (part.over is not None or part.complete):
            self._stages.close()
            self._reported.clear()

    def _lost(self, peer: int, why: str) -> Sequence[Effect]:
        return self._schedule().lost(peer, (peer, why))

    def _abort(self, error: BaseException) -> Sequence[Effect]:
        return self._schedule().abort(self._failure(error))

    def _start(self) -> Sequence[Effect]:
        return self._schedule().start()

    def _handle(self, peer: int, message: tuple[Any, ...]) -> Sequence[Effect]:
        part = self._schedule()
        if message[0] == GRADIENTS:
            _, retain_graph, marked, sends, tensors, report = message
            if part.over is None:
                stages = self._stages
                stages.retain_graph = retain_graph
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
        stages = self._stages
        recvs, tensors = stages.run(stage)
        self._reported.clear()
        place = 0
        for received in recvs:
            grads = tensors[place : place + received.outputs]
            place += received.outputs
            if received.peer == self._me.id:
                stages.add(received.id, grads)
            else:
                self._reported[received.id] = grads
        return self._schedule().ran(stage)

    def _wire(self, message: Message) -> tuple[Any, ...]:
        if isinstance(message, Gradients):
            tensors: list[Tensor | None] = []
            for send in message.sends:
                tensors += self._reported.pop(send)
            report = message.report and tuple(message.report)
            return GRADIENTS, self._stages.retain_graph, message.marked, message.sends, tensors, report
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
