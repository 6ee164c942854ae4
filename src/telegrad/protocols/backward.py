"""Schedule of one backward pass at one worker: the pure machine `PassSchedule`.

README.md and docs/autograd.md have the theory.

A worker's local graph begins at *sources*: the sends recorded at this worker and, at the root worker, the call of
`backward`. It ends at *recvs* and leaves. A gradient arrives at a source and the graph runs in *stages*. Each recv
sends one complete gradient back to the sender of the message, where it arrives at that message's send.

- A recv is complete when every source that reaches it has arrived, or is known never to arrive. Recvs with the same
  sources are a *group*. A group runs as soon as it is complete. The groups depend on the graph alone, not on the order
  of arrival.
- The *final* stage runs all nodes that lead to no group. It runs when all sources have arrived, or when the root
  reports that no more will arrive.
- A source that the roots do not reach never gets a gradient. A group that waits for one is *blocked*. When no worker
  can make progress, the root starts the *mark phase*. It marks the sends that it reaches, and these mark the sends that
  they reach. When the mark phase has ended, unmarked sources are known never to arrive. Without blocked groups the mark
  phase is skipped.

**Termination.** A worker that has processed a message reports to the root which tokens it consumed and which it
produced. One report covers one event; it travels with a gradient to the root if there is one. The root keeps produced
minus consumed, starting with the messages that it sent (`backward_root.Ledger`).

**Usage.** Call from one thread at a time. Every method returns effects, to be executed in order. After `Run`, run the
stage and call `ran` or `failed` before any other method. The stage's gradients are sent with the `Gradients` that `ran`
returns. Messages may arrive in any order. A message arrives at most once, and is lost only with its sender or receiver,
which the caller reports with `lost`; or because there is no session with the receiver, which it reports with
`unreachable`.

The file is longer than others: it is one machine, whose events share one state.

Invariants, by name (checked by tests/protocols/backward_world.py after every step):

- **E1** each stage runs at most once, and not before all sources that reach it have arrived or cannot arrive;
- **E2** each source gets at most one gradient, and gets one if and only if the root reaches it;
- **T1** `Finished` without error comes when no message is in flight, no stage is running, and none is left to run;
- **T2** when no event is left, the root is `Finished`: no hang, whichever workers died during the pass;
- **T3** the ledger's counts are produced minus consumed of the reports received, each in {-1, 0, 1};
- **L1** a live worker watches each worker that it sent a message to until its own part of the pass has ended.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

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
    UnknownSend,
)
from telegrad.protocols.backward_root import Ledger

__all__ = ["PassSchedule", "UnknownSend"]

GRADIENT, MARK, MARKED, FINISH = map(int, TokenKind)
LayoutGetter: TypeAlias = Callable[[Sequence[int]], Layout]


class PassSchedule:
    """Schedule of one pass at one worker.

    Args:
        me: Id of this worker.
        root: Id of the worker that called `backward`.
        layout: Returns the local graph, when it is first needed. Called again with the sends of a message that are not
            in it: returns further subgraphs, with numbers that follow on.
        pending: Returns whether gradients are left that only the final stage consumes.
    """

    __slots__ = (
        *("me", "root", "over", "watched", "ledger"),
        *("_arrived", "_consumed", "_done", "_event", "_expected", "_final_ran", "_finishing", "_gone", "_layout"),
        *("_make_layout", "_marked", "_marks_sent", "_incomplete", "_pending", "_produced", "_reached", "_ready"),
        *("_mark_phase_over", "_senders", "_has_notified_senders"),
    )

    def __init__(self, me: int, root: int, layout: LayoutGetter, pending: Callable[[], bool]) -> None:
        self.me = me
        self.root = root
        self.over: Finished | Dropped | None = None
        self.watched: set[int] = set()  # workers that this worker has sent a message to
        self.ledger: Ledger | None = Ledger() if me == root else None
        self._make_layout = layout
        self._pending = pending
        self._layout: Layout | None = None
        self._arrived = 0  # sources, by bit
        self._expected = 0  # sources that have arrived or may arrive: all, or after the mark phase the marked ones
        self._marked = 0
        self._mark_phase_over = False
        self._finishing = False
        self._final_ran = False
        self._reached: list[list[int]] = []  # bit -> the groups that it reaches
        self._ready: list[int] = []  # a heap of groups
        self._done: set[int] = set()  # groups that are ready or have run
        self._incomplete: set[int] = set()  # groups with some sources arrived and some missing
        self._marks_sent: set[int] = set()  # groups (or FINAL) with their recvs marked
        self._gone: dict[int, object] = {}
        self._senders: set[int] = set()  # other workers than the root whose messages this worker has
        self._has_notified_senders = False  # that it cannot reach the root
        self._event = 0
        self._consumed: list[Token] = []  # in the running event
        self._produced: list[tuple[Token, int]] = []

    # ---- events ------------------------------------------------------------------------------------------------------

    def start(self) -> Sequence[Effect]:
        """Start the pass at the root; the gradients of the roots are in place."""
        self._arrive((ROOT,))
        return self._advance()

    def handle(self, sender: int, message: Message) -> Sequence[Effect]:
        """Process a message from another worker's schedule.

        Raises:
            UnknownSend: The message names a send that is not in the local graph. Call `failed` next.
        """
        if sender != self.root:
            self._senders.add(sender)
        if self.over is not None:
            return self._after_the_end(sender, message)
        if isinstance(message, Gradients):
            if message.report is not None:
                self._record_report(sender, message.report)
            self._arrive(message.sends)
            self._consumed += [(GRADIENT, send) for send in message.sends]
            if message.marked:
                self._end_mark_phase()
            return self._advance()
        if isinstance(message, Report):
            self._record_report(sender, message)
            return self._check_progress()
        if isinstance(message, Mark):
            self._consumed += [(MARK, send) for send in message.sends]
            return self._close(self._pass_marks(message.sends))
        if isinstance(message, Marked):
            self._consumed.append((MARKED, self.me))
            self._end_mark_phase()
            return self._advance()
        if isinstance(message, Finish):
            self._consumed.append((FINISH, self.me))
            self._finishing = True
            return self._advance()
        if isinstance(message, Abort):
            return self._end(Dropped(message.why))
        return self.abort(message.why)  # Failed, Lost

    def ran(self, stage: int) -> Sequence[Effect]:
        """Record that the stage of the last `Run` has run.

        The gradients of its recvs are available. Those of messages from this worker to itself are in place already.
        """
        layout = self._layout
        assert layout is not None
        if stage == FINAL:
            self._final_ran = True
            recvs = layout.final
        else:
            recvs = layout.groups[stage].recvs
        by_peer: dict[int, list[int]] = {}
        for send, peer in recvs:
            by_peer.setdefault(peer, []).append(send)
        effects: list[Effect] = []
        mine = by_peer.pop(self.me, None)
        if mine is not None:
            self._arrive(mine)
        for peer, sends in by_peer.items():
            self._produced += [((GRADIENT, send), peer) for send in sends]
            effects += self._send(peer, Gradients(tuple(sends), self._mark_phase_over))
        return self._advance(effects)

    def failed(self, why: object) -> Sequence[Effect]:
        """Record that a stage, or another step at this worker, raised `why`."""
        if self.over is not None:
            return ()
        if self.me == self.root:
            return self.abort(why)
        return [Send(self.root, Failed(why)), *self._end(Dropped(why))]

    def abort(self, why: object) -> Sequence[Effect]:
        """End the pass with the error `why`.

        A worker that is not the root notifies the root.
        """
        if self.over is not None:
            return ()
        if self.ledger is None:
            return self.failed(why)
        peers = (self.ledger.known | self.watched) - self._gone.keys() - {self.me}
        return [*(Send(peer, Abort(why)) for peer in sorted(peers)), *self._end(Finished(why))]

    def lost(self, peer: int, why: object) -> Sequence[Effect]:
        """Record the loss of worker `peer`.

        If it took part, `why` becomes the error of the pass.
        """
        self._gone[peer] = why
        if self.over is not None:
            return ()
        if peer == self.root:
            return self._end(Dropped(why))
        if self.ledger is not None:
            return self.abort(why) if peer in self.ledger.known | self.watched else ()
        return [Send(self.root, Lost(peer, why))] if peer in self.watched else ()

    def unreachable(self, peer: int, why: object) -> Sequence[Effect]:
        """Record an undelivered message: there is no session with worker `peer`.

        At the root this ends the pass; the worker is notified if it reaches the root later.

        If `peer` is the root, the workers that this one has messages from pass the error on to it. There are sessions
        with them, and at least one of them got its own first message earlier: so the error comes to the root, or the
        news of a session that has ended.
        """
        if self.ledger is not None:
            self.watched.discard(peer)
            self.ledger.known.discard(peer)
            return self.abort(why)
        effects = self.lost(peer, why)
        if peer != self.root or self._has_notified_senders:
            return effects
        self._has_notified_senders = True
        return [*(Send(sender, Failed(why)) for sender in sorted(self._senders - self._gone.keys())), *effects]

    # ---- progress ----------------------------------------------------------------------------------------------------

    @property
    def blocked(self) -> bool:
        """Whether a recv has part of its gradient and waits for another source."""
        if self._incomplete:
            return True
        layout = self._layout
        return bool(
            layout is not None
            and layout.final
            and self._arrived
            and not self._final_ran
            and self._expected & ~self._arrived
        )

    @property
    def deferred(self) -> bool:
        """Whether gradients are left for the final stage."""
        return bool(self._arrived) and not self._final_ran and self._pending()

    @property
    def complete(self) -> bool:
        """Whether all sources that will arrive have arrived and no stage is left to run."""
        return bool(
            self._layout is not None
            and self._arrived
            and (self._finishing or not self._expected & ~self._arrived)
            and not self._ready
            and not self._incomplete
            and (self._final_ran or not (self._layout.final or self._pending()))
        )

    def _learn_layout(self, sends: Sequence[int] = ()) -> Layout:
        """Return the layout, with the subgraphs to which these sends belong."""
        layout = self._layout
        if layout is None:
            layout = self._layout = self._make_layout(sends)
            self._add_sources(layout, 0, 0)
        elif any(send not in layout.sources for send in sends):
            further, sources, groups = self._make_layout(sends), len(layout.sources), len(layout.groups)
            if further.sources.keys() - layout.sources.keys():
                layout.sources.update(further.sources)
                layout.groups.extend(further.groups)
                self._add_sources(layout, sources, groups)
                self._final_ran = False  # it was the last stage of the other subgraphs
        return layout

    def _add_sources(self, layout: Layout, first: int, first_group: int) -> None:
        """Process the sources and groups of the layout from these numbers on."""
        if not self._mark_phase_over:
            self._expected |= (1 << len(layout.sources)) - (1 << first)
        self._reached += [[] for _ in range(first, len(layout.sources))]
        for number, group in enumerate(layout.groups[first_group:], first_group):
            mask = group.mask
            while mask:
                low = mask & -mask
                self._reached[low.bit_length() - 1].append(number)
                mask ^= low

    def _arrive(self, sends: Sequence[int]) -> None:
        sources = self._learn_layout(sends).sources
        for send in sends:
            bit = sources.get(send)
            if bit is None:
                raise UnknownSend(send, "no record at this worker, or was sent after backward began")
            if self._arrived >> bit & 1:
                raise UnknownSend(send, "already received its gradient")
            self._arrived |= 1 << bit
            self._marked |= 1 << bit
            if self._reached[bit]:
                self._update_groups(self._reached[bit])

    def _update_groups(self, groups: Iterable[int]) -> None:
        """Move groups that are now complete to the ready heap."""
        layout = self._layout or self._learn_layout()
        waiting = self._expected & ~self._arrived
        for number in groups:
            if number in self._done:
                continue
            if layout.groups[number].mask & waiting:
                self._incomplete.add(number)
            else:
                self._incomplete.discard(number)
                self._done.add(number)
                heappush(self._ready, number)

    def _end_mark_phase(self) -> None:
        if not self._mark_phase_over:
            self._learn_layout()
            self._mark_phase_over = True
            self._expected = self._marked
            self._update_groups(sorted(self._incomplete))

    def _advance(self, effects: Iterable[Effect] = ()) -> Sequence[Effect]:
        """Run the next stage, or close the event.

        `effects` are the messages of the last stage.
        """
        if self._ready:
            return [*effects, Run(heappop(self._ready))]
        layout = self._layout or self._learn_layout()
        if (
            not self._final_ran
            and self._arrived
            and not self._incomplete
            and (self._finishing or not self._expected & ~self._arrived)
            and (layout.final or self._pending())
        ):
            return [*effects, Run(FINAL)]
        return self._close(effects)

    def _close(self, effects: Iterable[Effect]) -> Sequence[Effect]:
        """Close the event and report it to the root."""
        self._event += 1
        report = Report(self._event, tuple(self._consumed), tuple(self._produced), self.blocked, self.deferred)
        self._consumed, self._produced = [], []
        sent = list(effects)
        if self.ledger is not None:
            self.ledger.enter(self.me, report)
            sent += self._check_progress()
        else:
            for place in range(len(sent) - 1, -1, -1):
                effect = sent[place]
                if isinstance(effect, Send) and effect.to == self.root and isinstance(effect.message, Gradients):
                    sent.append(Send(self.root, effect.message._replace(report=report)))
                    del sent[place]
                    break
            else:
                sent.append(Send(self.root, report))
        return sent

    def _send(self, peer: int, message: Message) -> list[Effect]:
        self.watched.add(peer)
        if peer not in self._gone:
            return [Send(peer, message)]
        # No worker will report this message as consumed. The root finds the lost worker in its ledger, and
        # `_check_progress` aborts.
        return [] if self.ledger is not None else [Send(self.root, Lost(peer, self._gone[peer]))]

    def _pass_marks(self, sends: Sequence[int]) -> list[Effect]:
        """Mark these sources of this worker and the sends that they reach."""
        layout = self._learn_layout(sends)
        found: dict[int, list[int]] = {}
        todo = list(sends)
        while todo:
            send = todo.pop()
            bit = self._learn_layout((send,)).sources.get(send)
            if bit is None:
                raise UnknownSend(send, "no record at this worker, or was sent after backward began")
            self._marked |= 1 << bit
            recvs: list[tuple[int, int]] = []
            for number in (FINAL, *self._reached[bit]):
                if number not in self._marks_sent:
                    self._marks_sent.add(number)
                    recvs += layout.final if number == FINAL else layout.groups[number].recvs
            for number, peer in recvs:
                if peer == self.me:
                    todo.append(number)
                else:
                    found.setdefault(peer, []).append(number)
        for peer, marks in found.items():
            self._produced += [((MARK, send), peer) for send in marks]
        return [effect for peer, marks in found.items() for effect in self._send(peer, Mark(tuple(marks)))]

    # ---- the root's part ---------------------------------------------------------------------------------------------

    def _record_report(self, worker: int, report: Report) -> None:
        if self.ledger is None:
            raise LookupError(f"worker {worker} sent a report to worker {self.me}, but the root is worker {self.root}")
        self.ledger.enter(worker, report)

    def _check_progress(self) -> Sequence[Effect]:
        """Begin the next phase, or finish, if no message is in flight.

        At the root, between events.
        """
        ledger = self.ledger
        assert ledger is not None
        if self.over is not None:
            return ()
        for peer, why in self._gone.items():
            if peer in ledger.known or peer in self.watched:  # lost before the root learned that it takes part
                return self.abort(why)
        if ledger.outstanding:
            return ()
        blocked = ledger.blocked()
        if blocked:
            if not ledger.mark_phase_begun:
                ledger.mark_phase_begun = True
                return self._close(self._pass_marks((ROOT,)))
            notified = blocked & ledger.notified
            assert not notified, (
                f"workers {sorted(notified)} are blocked although all sources that will arrive have arrived"
            )
            return self._notify(blocked, MARKED, Marked(), self._end_mark_phase)
        deferred = ledger.deferred()
        if deferred and not ledger.finishing:
            ledger.finishing = True
            return self._notify(deferred, FINISH, Finish(), self._finish)
        assert not deferred, f"workers {sorted(deferred)} keep gradients after the last stage"
        return self._end(Finished())

    def _notify(self, workers: set[int], kind: int, message: Message, locally: Callable[[], None]) -> Sequence[Effect]:
        assert self.ledger is not None
        sends: list[Effect] = []
        self.ledger.notified |= workers
        for worker in sorted(workers - {self.me}):
            self._produced.append(((kind, worker), worker))
            sends += self._send(worker, message)
        if self.me in workers:
            locally()
        return self._advance(sends)

    def _finish(self) -> None:
        self._finishing = True

    def _end(self, how: Finished | Dropped) -> Sequence[Effect]:
        self.over = how
        self._ready.clear()
        self._incomplete.clear()
        return [how]

    def _after_the_end(self, sender: int, message: Message) -> Sequence[Effect]:
        """Notify workers that an aborted root learned of after the abort."""
        ledger = self.ledger
        if ledger is None or not isinstance(self.over, Finished) or self.over.why is None:
            return ()
        before = ledger.known | self.watched | self._gone.keys() | {self.me}
        report = message.report if isinstance(message, Gradients) else message
        if isinstance(report, Report):
            ledger.enter(sender, report)
        fresh = (ledger.known | {sender}) - before
        self.watched |= fresh
        return [Send(peer, Abort(self.over.why)) for peer in sorted(fresh)]
