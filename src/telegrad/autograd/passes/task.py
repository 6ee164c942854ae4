"""A backward pass at work on one worker: what `BackwardPass` decides, carried out by threads.

Whoever brings something for a pass, a message or news, carries it out unless another thread is in it; then that one
will. What is to be sent goes to `manager.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor

from telegrad.autograd.passes import profile as profiled
from telegrad.autograd.passes.backward_pass import BackwardPass
from telegrad.worker.calls import tracing
from telegrad.worker.scope import Scope, current

if TYPE_CHECKING:
    from telegrad.autograd.context import Context
    from telegrad.worker.calls.tracing import Recording

__all__ = ["PassResult", "PassTask", "PendingRequest"]

_new: Any = tuple.__new__  # a scope without its constructor's frame

Answer: TypeAlias = Callable[[list[Any], profiled.Profile | None], None]
Event: TypeAlias = tuple[Any, ...]  # a method of a pass, and its arguments


class PassResult:
    """How a pass ended, at its root, and who waits for that: one thread."""

    over: bool = False
    error: BaseException | None = None
    _waiting: threading.Event | None = None

    def come(self, error: BaseException | None) -> None:
        """It is over, at the root."""
        if self.over:
            return
        self.error = error
        self.over = True  # the waiting thread looks at this after it has said that it waits
        if self._waiting is not None:
            self._waiting.set()

    def wait(self, nanoseconds: int) -> None:
        """Until the pass has ended, or the time is over."""
        if self._waiting is None:
            self._waiting = threading.Event()
        if not self.over:
            self._waiting.wait(nanoseconds / 1e9)


class Messenger(Protocol):
    """The passes of a worker, as far as one of them needs them (`manager.py`)."""

    me: int
    worker: Any
    working: set[PassTask]

    def ask(self, run: PassTask, peer: int, messages: list[Any], profile: profiled.Profile | None) -> None:
        """Send a peer messages of a pass."""

    def answered(self, run: PassTask, peer: int, outcome: tuple[Any, ...]) -> None:
        """Process the completion of such a request."""


class PassTask:
    """One pass on this worker: at most one thread at a time is in it, and takes up what others bring meanwhile.

    Args:
        passes: those of the worker.
        context: in which it runs.
        root: id of the worker on which `backward` was called.
        number: of the pass among all of that worker.
        deadline: monotonic ns by which the root gives up; 0: never.
    """

    __slots__ = (
        *("asked", "context", "deadline", "end", "number", "passes", "profile", "root"),
        *("_events", "_pass", "_to_send", "_working"),
    )

    def __init__(self, passes: Messenger, context: Context, root: int, number: int, deadline: int) -> None:
        self.context = context
        self.root = root
        self.number = number
        self.deadline = deadline
        self.asked: deque[PendingRequest] = deque()  # at the root: what its thread may wait for
        self.end: PassResult = PassResult()
        self.passes = passes
        self._working = threading.Lock()  # held by the thread that is in it
        self._events: deque[Event] = deque()
        self._to_send: list[tuple[int, tuple[Any, ...]]] = []
        worker = passes.worker
        self.profile: profiled.PassProfile | None = None
        if tracing.observer.on or tracing.observer.serving:  # later, too, a message may ask for it
            self._profile()
        # The pass gets nothing of this object itself: that would be a cycle, for the collector to find.
        self._pass = BackwardPass(
            worker.info, context, number, root, self._to_send.append, self.end.come, worker.name_of
        )

    # ---- events

    def start(self, roots: list[Tensor], retain_graph: bool) -> None:
        """At the root: begins."""
        self._take((self._pass.start, roots, retain_graph))

    def messages(self, peer: int, messages: list[Any], answer: Answer | None = None) -> None:
        """A peer has sent these.

        Args:
            answer: called once, soon, with messages for that peer, and what to say to a profile.
        """
        on_message = self._pass.on_message
        if len(messages) == 1:
            self._take((on_message, peer, messages[0]), peer=peer, answer=answer)
        else:
            self._take(*[(on_message, peer, message) for message in messages], peer=peer, answer=answer)

    def peer_lost(self, peer: int, why: str) -> None:
        """A worker is gone."""
        self._take((self._pass.peer_lost, peer, why))

    def abort(self, error: BaseException) -> None:
        """It cannot go on here."""
        self._take((self._pass.abort, error))

    def _take(self, *happened: Event, peer: int | None = None, answer: Answer | None = None) -> None:
        """Whoever finds nobody in it carries out all that has happened; else who is in it will, on its way out."""
        events = self._events
        events += happened
        working = self._working
        while events and working.acquire(False):
            try:
                if self.profile is None and not tracing.observer.serving:
                    self._carry_out(peer, answer, None)
                else:
                    recording = self._profile().recording()
                    with recording or profiled.NOTHING:
                        self._carry_out(peer, answer, recording)
                    self._profile().done(recording)
                answer = None
            finally:
                working.release()
        if answer is not None:
            answer([], None)

    def _carry_out(self, peer: int | None, answer: Answer | None, recording: Recording | None) -> None:
        events, to_send, passes = self._events, self._to_send, self.passes
        scope = current.get()
        if scope is None or scope.autograd is not self.context:  # hooks that make calls make them in the context
            request = scope is not None and scope.request
            current.set(_new(Scope, (passes.worker, self.deadline, True, request, self.context, 0)))
        if self.root != passes.me:
            passes.working.add(self)
        try:
            while True:
                for _ in range(len(events)):
                    event = events.popleft()
                    if tracing.observer.on:
                        with profiled.taking(event):
                            event[0](*event[1:])
                    else:
                        event[0](*event[1:])
                mine: list[Any] = []
                if to_send:
                    by_peer: dict[int, list[Any]] = {}
                    for to, message in to_send:
                        if to in by_peer:
                            by_peer[to].append(message)
                        else:
                            by_peer[to] = [message]
                    to_send.clear()
                    if answer is not None and peer is not None:
                        mine = by_peer.pop(peer, mine)
                    for to, messages in by_peer.items():
                        if self.profile is None:
                            passes.ask(self, to, messages, None)
                        else:
                            self._send(partial(passes.ask, self, to), messages, to, recording)
                if answer is not None:
                    if self.profile is None:
                        answer(mine, None)
                    else:
                        self._send(answer, mine, peer, recording)
                    answer = None
                if not events:
                    return
        finally:
            if self.root != passes.me:
                passes.working.discard(self)
            current.set(scope)

    def _send(self, send: Answer, messages: list[Any], to: int | None, recording: Recording | None) -> None:
        profile = None if self.profile is None else self.profile.leaving(recording, to == self.root)
        if tracing.observer.on:
            with profiled.sending(messages):
                send(messages, profile)
        else:
            send(messages, profile)

    @property
    def idle(self) -> bool:
        """Nothing is expected to come any more; it is over, or only the root does not know yet that it is."""
        return self._pass.idle

    # ---- profiles

    def _profile(self) -> profiled.PassProfile:
        if self.profile is None:
            self.profile = profiled.PassProfile(self.passes.worker.calls, self.root == self.passes.me)
        return self.profile

    def arrived(self, profile: profiled.Profile) -> None:
        """A message has said this to a profile."""
        self._profile().arrived(profile)

    # ---- waiting

    def waiting_for(self) -> str:
        """What is outstanding, and where."""
        return self._pass.waiting_for()


class PendingRequest:
    """Messages on their way to a peer, whose answer is awaited. Called with what became of them."""

    call = 0
    done: bool = False
    peer: int
    run: PassTask

    def __call__(self, outcome: tuple[Any, ...]) -> None:
        self.done = True
        self.run.passes.answered(self.run, self.peer, outcome)
