"""Backward pass at one worker: runs the local stages as the schedule requires.

protocols/backward.py has the schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from telegrad.autograd.context import Context, Entry, WireMessage
from telegrad.autograd.execution.stages import StageRunner
from telegrad.autograd.execution.wanted import Wanted
from telegrad.autograd.passes.failures import SECOND_TIME, Reason, describe_awaited, unpack_error
from telegrad.autograd.passes.messages import (
    ABORT,
    ALONE,
    DISCARD,
    GRADIENTS,
    REPORT,
    RETAIN,
    decode_message,
    encode_message,
    fast_report,
)
from telegrad.autograd.plain.records import PlainContext
from telegrad.autograd.plain.stages import PlainStages
from telegrad.protocols.backward import PassSchedule
from telegrad.protocols.backward_messages import (
    FINAL,
    ROOT,
    Abort,
    Dropped,
    Effect,
    Finished,
    Gradients,
    Layout,
    Message,
    Report,
    Run,
    Send,
    Token,
    TokenKind,
)
from telegrad.serialize.exceptions import pack_exception
from telegrad.serialize.tracebacks import text_of
from telegrad.serialize.unpickling import OPEN, PickleGate
from telegrad.types import WorkerInfo

__all__ = ["BackwardPass"]

logger: logging.Logger = logging.getLogger("telegrad")

_GRADIENT = int(TokenKind.GRADIENT)


class BackwardPass:
    """Part of this worker in a call of `backward`.

    In most passes a worker has one stage to run, and sends its gradients to one other worker: for example a server, and
    a trainer that computes its loss from the server's replies. On this *fast path* the schedule's messages are known in
    advance, and the pass sends them without a schedule. On any other event `_materialize_schedule` creates the schedule
    and brings it up to date.

    Its methods block only in the local engine (and DDP's reductions in it), which runs hooks and functions of the user;
    none raises. They must be called one at a time, from any thread. They call `send` and `finished`.

    Args:
        worker: This worker.
        context: The record of the forward pass at this worker. Its `gradients` are added to.
        number: Number of the pass among the root's, for log messages.
        root_worker: Id of the worker that called `backward`.
        send: Gets (a worker id, a message), and sends it at once or later; a message may only be lost together with a
            call of `peer_lost`. If it raises, the pass fails. It must copy or hold the tensors before it returns, and
            not write to them.
        finished: Called once, at the root only, when the pass is over, with None or the error that `backward` raises.
            All gradients are then in the contexts of their workers.
        name_of: Returns the name of a worker, for errors.
        lost_incarnation: Returns the incarnation that a worker's loss is about, for errors.
        gate: Permission to load pickles, for errors.
    """

    _cause: BaseException | None = None  # at the root: cause of the error that it raises, if it is the root's own error
    _schedule: PassSchedule | None = None
    _unsent: dict[int, Sequence[Tensor | None]]  # recv -> gradients, between its stage and their sending
    # Without a schedule:
    _fast_source: int | None = None  # the source with the stage that the fast path has run
    _mode = 0
    _fast_sends: tuple[int, ...] = ()  # the messages that get gradients from this stage
    _fast_peer = -1  # their sender
    _finished_fast = False  # at the root: the pass has ended without a schedule

    def __init__(
        self,
        worker: WorkerInfo,
        context: Context,
        number: int,
        root_worker: int,
        send: Callable[[tuple[int, WireMessage]], None],
        finished: Callable[[BaseException | None], None],
        name_of: Callable[[int], str] = str,
        lost_incarnation: Callable[[int, str], int] = lambda *_: 0,
        gate: PickleGate = OPEN,
    ) -> None:
        self._number = number
        self._worker = worker
        self._context = context
        self._send = send
        self._finished = finished
        self._name_of, self._lost_incarnation, self._gate = name_of, lost_incarnation, gate
        self._root = root_worker
        self._stages: StageRunner | PlainStages = (
            PlainStages(context) if isinstance(context, PlainContext) else StageRunner(context)
        )

    # ---- events ------------------------------------------------------------------------------------------------------

    def start(
        self,
        roots: Sequence[Entry],
        retain_graph: bool,
        gradients: Sequence[Tensor | None] | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        """Begin at the root worker.

        Args:
            roots: The roots.
            retain_graph: Whether torch keeps the graph.
            gradients: A gradient for each root; by default ones.
            wanted: In a pass of `torch.autograd.grad`, the gradients to return.
        """
        try:
            self._mode = (RETAIN if retain_graph else 0) | (0 if wanted is None else DISCARD)
            stages = self._stages
            stages.retain_graph = retain_graph
            if wanted is not None:
                stages.discard_leaves(wanted)
            graph = stages.open(roots)
            stages.add(ROOT, gradients or [torch.ones_like(root) for root in roots if isinstance(root, Tensor)])
            peer = graph.single_peer(self._worker.id)
            if peer is not None:
                sends, tensors = self._run_fast(ROOT, graph.bits[ROOT], peer)
                mode = self._mode | ALONE if stages.is_alone else self._mode
                self._send((peer, (GRADIENTS, mode, False, sends, tensors, None)))
                return
        except BaseException as error:
            self._fail(error)
            return
        self._run_event(self._start)

    def on_message(self, peer: int, message: WireMessage) -> None:
        """Process a message of a worker, also a late one after the end of the pass."""
        if self._schedule is None:
            if self._finished_fast:
                return
            try:
                handle = self._finish_fast if self._root == self._worker.id else self._reply_fast
                if handle(peer, message):
                    return
            except BaseException as error:
                self._fail(error, from_message=True)
                return
        self._run_event(partial(self._handle, peer, message), from_message=True)

    def peer_lost(self, peer: int, why: str) -> None:
        """Process the loss of a worker; required for every loss during the context."""
        if not self._finished_fast:
            self._run_event(lambda: self._materialize_schedule().lost(peer, (peer, why)))

    def peer_unreachable(self, peer: int, why: str) -> None:
        """Process an undelivered message: there is no session with the worker."""
        if not self._finished_fast:
            reason = (peer, why)
            if peer == self._root:
                reason = (self._worker.id, f"it cannot reach worker {self._name_of(peer)}: {why}")
            self._run_event(lambda: self._materialize_schedule().unreachable(peer, reason))

    def abort(self, error: BaseException) -> None:
        """End the pass with an error, which at the root goes to `finished`."""
        if not self._finished_fast:
            self._run_event(lambda: self._materialize_schedule().abort(self._pack_error(error, False)))

    @property
    def key(self) -> tuple[int, int]:
        """The id of its context, and its number."""
        return self._context.id, self._number

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the root has called `finished`, or another worker has failed.

        The pass of another worker that succeeds waits for a notification of the root, which need not arrive.
        """
        return self._finished_fast if self._schedule is None else self._schedule.over is not None

    @property
    def holds_graph(self) -> bool:
        """Whether the local graph has not been released."""
        return self._stages.holds_graph

    @property
    def is_idle(self) -> bool:
        """Whether no message is expected any more and the local graph has been released.

        A root waits for reports until the end, even if it has no stage left to run.
        """
        if self._root == self._worker.id:
            return self.is_over
        if self._schedule is None:
            return self._fast_source is not None
        return self._schedule.over is not None or (self._schedule.complete and not self.holds_graph)

    @property
    def participants(self) -> set[int]:
        """At the root: other workers that may keep their parts of a pass that is over."""
        schedule = self._schedule
        if schedule is None or schedule.ledger is None:
            return set()
        return (schedule.ledger.known | schedule.watched) - {self._worker.id}

    def describe_pending(self) -> str:
        """Describe what the root waits for, for the error of a timeout."""
        schedule = self._schedule
        awaited: list[tuple[Token, int]] = []
        if schedule is None:
            if not self._finished_fast:
                awaited += [((_GRADIENT, send), self._fast_peer) for send in self._fast_sends]
        elif schedule.ledger is not None and not self.is_over:
            where = schedule.ledger.where
            awaited += [(token, where.get(token, -1)) for token in schedule.ledger.outstanding]
        return describe_awaited(awaited, self._name_of)

    # ---- the fast path -----------------------------------------------------------------------------------------------

    def _run_fast(self, source: int, stage: int, peer: int) -> tuple[tuple[int, ...], list[Tensor | None]]:
        """Run the stage of a source from which all gradients go to one worker.

        Returns:
            The ids of the messages that get gradients, and the gradients.
        """
        sends: list[int] = []
        tensors: list[Tensor | None] = []
        for received, grads in self._stages.run(stage):
            sends.append(received.id)
            tensors += grads
        self._fast_source, self._fast_sends, self._fast_peer = source, tuple(sends), peer
        return self._fast_sends, tensors

    def _finish_fast(self, peer: int, message: WireMessage) -> bool:
        """End the pass if this message is the last, else do nothing and return False."""
        sends: Sequence[int] = ()
        tensors: list[Tensor | None] = []
        marked = False
        if message[0] == GRADIENTS:
            _, _, marked, sends, tensors, report = message
        elif message[0] == REPORT:
            report = message[1]
        else:
            return False
        # It reports that its sender has all gradients, has produced those that it carries, and has no work left.
        if peer != self._fast_peer or marked or report != fast_report(self._fast_sends, sends, self._root):
            return False
        stages = self._stages
        numbers = stages.open_ends(sends)
        if numbers is None:
            return False
        self._add_all(sends, tensors)
        for send in sends:
            stages.run(numbers[send])
        stages.close()
        self._finished_fast = True
        self._finished(None)
        return True

    def _reply_fast(self, peer: int, message: WireMessage) -> bool:
        """Run all stages if a message has all gradients, and its sender gets all results.

        Else run nothing and return False. At other workers than the root.
        """
        if message[0] != GRADIENTS or peer != self._root or self._fast_source is not None:
            return False
        _, mode, marked, sends, tensors, _ = message
        stages = self._stages
        if marked or len(sends) != 1:
            return False
        graph = stages.open(sends=sends, alone_with=peer if mode & ALONE else None)
        if not graph.leads_back(sends[0], peer):
            return False
        self._set_mode(mode)
        self._add_all(sends, tensors)
        back, found = self._run_fast(sends[0], graph.bits[sends[0]] if graph.is_subgraph else FINAL, peer)
        stages.close()
        report = fast_report(sends, back, peer)
        if back:
            self._send((peer, (GRADIENTS, self._mode, False, back, found, report)))
        else:
            self._send((peer, (REPORT, report)))
        return True

    def _add_all(self, sends: Sequence[int], tensors: list[Tensor | None]) -> None:
        """Add the gradients of a message, and empty their list."""
        grads = iter(tensors)
        try:
            for send in sends:
                self._stages.add(send, grads)
        except StopIteration:
            raise IndexError(f"{len(tensors)} gradients are too few for the messages {list(sends)}") from None
        tensors.clear()  # only the stages hold them now

    def _set_mode(self, mode: int) -> None:
        """Take the mode of the pass from a message."""
        self._mode = mode & ~ALONE
        self._stages.retain_graph = bool(mode & RETAIN)
        if mode & DISCARD:
            self._stages.discard_leaves()

    # ---- the schedule ------------------------------------------------------------------------------------------------

    def _materialize_schedule(self) -> PassSchedule:
        """Return the schedule; the first call creates it, and replays the fast path."""
        schedule = self._schedule
        if schedule is None:
            stages, source = self._stages, self._fast_source
            layout: Callable[[Sequence[int]], Layout] = stages.layout
            if isinstance(stages, StageRunner) and source is not None and source != ROOT:
                # All has run, and the graph has been released.
                recvs = tuple([(send, self._fast_peer) for send in self._fast_sends])
                layout = partial(_layout_of, Layout({source: 0}, [], recvs))
            schedule = PassSchedule(self._worker.id, self._root, layout, stages.pending)
            if source is not None:
                effects = (
                    schedule.start() if source == ROOT else schedule.handle(self._root, Gradients((source,), False))
                )
                if isinstance(effects[-1], Run):
                    schedule.ran(effects[-1].stage)
            self._schedule, self._unsent = schedule, {}
        return schedule

    def _run_event(self, event: Callable[[], Sequence[Effect]], from_message: bool = False) -> None:
        try:
            self._apply(event())
        except BaseException as error:  # of hooks, functions, the engine, or of sending: the pass has failed
            self._fail(error, from_message)
        self._release_if_complete()

    def _fail(self, error: BaseException, from_message: bool = False) -> None:
        try:
            schedule = self._materialize_schedule()
            self._apply(schedule.failed(self._pack_error(error, from_message)))
        except BaseException:
            logger.exception("backward pass %s: worker %s cannot report its failure", self.key, self._worker.name)
        self._release_if_complete()

    def _release_if_complete(self) -> None:
        schedule = self._schedule
        if self.holds_graph and schedule is not None and (schedule.over is not None or schedule.complete):
            self._stages.close()
            self._unsent.clear()

    def _start(self) -> Sequence[Effect]:
        return self._materialize_schedule().start()

    def _handle(self, peer: int, message: WireMessage) -> Sequence[Effect]:
        schedule = self._materialize_schedule()
        if message[0] == GRADIENTS:
            _, mode, marked, sends, tensors, report = message
            if schedule.over is None:
                self._set_mode(mode)
                self._stages.open(sends=sends)
                self._add_all(sends, tensors)
            return schedule.handle(peer, Gradients(sends, marked, report and Report(*report)))
        return schedule.handle(peer, decode_message(message))

    def _apply(self, effects: Sequence[Effect]) -> None:
        while effects:
            for effect in effects:
                if isinstance(effect, Send):
                    self._send((effect.to, self._encode(effect.message)))
            last = effects[-1]
            effects = ()
            if isinstance(last, Run):
                effects = self._run(last.stage)
            elif isinstance(last, Finished):
                self._finished(None if last.why is None else self._unpack_error(last.why))
            elif isinstance(last, Dropped):
                logger.debug("backward pass %s: dropped by worker %s: %s", self.key, self._worker.name, last.why)

    def _run(self, stage: int) -> Sequence[Effect]:
        stages = self._stages
        self._unsent.clear()
        for received, grads in stages.run(stage):
            if received.peer == self._worker.id:
                stages.add(received.id, grads)
            else:
                self._unsent[received.id] = grads
        return self._materialize_schedule().ran(stage)

    def _encode(self, message: Message) -> WireMessage:
        if isinstance(message, Gradients):
            tensors: list[Tensor | None] = []
            for send in message.sends:
                tensors += self._unsent.pop(send)
            report = message.report and tuple(message.report)
            return GRADIENTS, self._mode, message.marked, message.sends, tensors, report
        if isinstance(message, Abort):
            return ABORT, str(self._unpack_error(message.why))
        return encode_message(message)

    # ---- errors ------------------------------------------------------------------------------------------------------

    def _pack_error(self, error: BaseException, from_message: bool) -> Reason:
        """Return an error as it travels; at the root usually the error itself.

        As in torch, an error at the root that a message has caused, after the root's first stage, is reported like an
        error of another worker. The exception is what a signal handler raises (KeyboardInterrupt), which is no
        `Exception` and must not look like an error of the pass.
        """
        if self._root == self._worker.id:
            if not from_message or not isinstance(error, Exception):
                return error
            self._cause = error
        elif self._context.is_plain and type(error) is RuntimeError and SECOND_TIME in str(error):
            error = RuntimeError(f"On worker {self._worker.name}: {error}")
        return self._worker.id, pack_exception(error, self._worker, self._gate), text_of(error)

    def _unpack_error(self, why: Reason) -> BaseException:
        """Return the error that `backward` raises."""
        return unpack_error(why, self._worker.id, self._cause, self._name_of, self._lost_incarnation, self._gate)


def _layout_of(layout: Layout, _: Sequence[int]) -> Layout:
    return layout
