"""Backward passes on the move: what `Pass` decides, carried out by threads and messages.

The messages of a pass travel as requests, and the reply brings what the peer has for the sender in turn. So a pass over
two workers is one call: the thread that waits in `backward` reads the answer itself, and the one that reads the request
runs it. A worker that has something to say to a third one asks that one likewise.

Each message names the pass, (context, root, number), and the lowest number that is not over at the root: what a worker
keeps of earlier passes goes then, and what comes of them late is ignored.
"""

import itertools
import threading
import time
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from telegrad.autograd import profiled
from telegrad.autograd.context import Context
from telegrad.autograd.passes import Pass
from telegrad.errors import NotInitialized, RpcTimeout, TelegradError
from telegrad.serialize.exceptions import unpack_exception
from telegrad.wire import Flag, Status, Tag
from telegrad.worker.coroutines import holding_up
from telegrad.worker.profiling import Recording
from telegrad.worker.scope import Scope, current, remaining

__all__ = ["Passes", "Running"]

_GRADIENTS, _ERROR = int(Tag.GRADIENTS), int(Tag.ERROR)
_REPLIED, _TIMED_OUT, _STOPPED = int(Status.REPLIED), int(Status.TIMED_OUT), int(Status.STOPPED)
_PREAMBLE = int(Flag.PREAMBLE)
_LOOK = 20_000_000  # ns after which whoever waits for one worker's answer looks whether the pass has ended otherwise
_REMEDY = (
    "If it may take that long, give init_rpc's options a larger rpc_timeout (0 waits for ever); in a handler its"
    " caller's timeout counts as well."
)

Answer = Callable[[list[Any], profiled.Profile | None], None]


Event: TypeAlias = tuple[Callable[..., None], tuple[Any, ...]]  # a method of a pass, and its arguments


class End:
    """How a pass ended, at its root, and who waits for that."""

    __slots__ = ("_lock", "_waiting", "error", "over")

    def __init__(self) -> None:
        self.over = False
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._waiting: threading.Event | None = None

    def come(self, error: BaseException | None) -> None:
        """It is over, at the root."""
        with self._lock:
            if self.over:
                return
            self.over, self.error = True, error
            waiting = self._waiting
        if waiting is not None:
            waiting.set()

    def wait(self, nanoseconds: int) -> None:
        """Until the pass has ended, or the time is over."""
        with self._lock:
            if self.over:
                return
            if self._waiting is None:
                self._waiting = threading.Event()
        self._waiting.wait(nanoseconds / 1e9)


class Running:
    """One pass on this worker: at most one thread at a time is in it, and takes up what others bring meanwhile.

    Args:
        passes: those of the worker.
        context: in which it runs.
        root: id of the worker on which `backward` was called.
        number: of the pass among all of that worker.
        deadline: monotonic ns by which the root gives up; 0: never.
    """

    def __init__(self, passes: "Passes", context: Context, root: int, number: int, deadline: int) -> None:
        self.context = context
        self.root = root
        self.number = number
        self.deadline = deadline
        self.asked: deque[Question] = deque()  # at the root: what its thread may wait for
        self.end = End()
        self.working = False
        self._passes = passes
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._to_send: list[tuple[int, tuple[Any, ...]]] = []
        worker = passes.worker
        self.profile = profiled.PassProfile(worker.calls, root == worker.info.id)
        # The pass gets nothing of this object itself: that would be a cycle, for the collector to find.
        send = partial(_put, self._to_send)
        self._pass = Pass(worker.info, context, (context.id, number), root, send, self.end.come, worker.name_of)

    # ---- events

    def start(self, roots: list[Tensor], retain_graph: bool) -> None:
        """At the root: begins."""
        self._take(None, None, [(self._pass.start, (roots, retain_graph))])

    def messages(self, peer: int, messages: list[Any], answer: Answer | None = None) -> None:
        """A peer has sent these.

        Args:
            answer: called once, soon, with messages for that peer, and what to say to a profile.
        """
        self._take(peer, answer, [(self._on_message, (peer, message)) for message in messages])

    def _on_message(self, peer: int, message: Any) -> None:
        with profiled.taking(message):
            self._pass.on_message(peer, message)

    def peer_lost(self, peer: int, why: str) -> None:
        """A worker is gone."""
        self._take(None, None, [(self._pass.peer_lost, (peer, why))])

    def abort(self, error: BaseException) -> None:
        """It cannot go on here."""
        self._take(None, None, [(self._pass.abort, (error,))])

    def _take(
        self,
        peer: int | None,
        answer: Answer | None,
        events: list[Event],
    ) -> None:
        with self._lock:
            busy = self.working
            if busy:
                self._events += events
            self.working = True
        if busy:
            if answer is not None:
                answer([], None)
            return
        scope = current.get()
        if scope is None or scope.autograd is not self.context:  # hooks that make calls make them in the context
            current.set(
                Scope(self._passes.worker, self.deadline, True, scope is not None and scope.request, self.context)
            )
        if self.root != self._passes.me:
            self._passes.working.add(self)
        recording = self.profile.recording()
        with recording or profiled.NOTHING:
            self._carry_out(events, peer, answer, recording)
            while True:
                with self._lock:
                    if not self._events:
                        self._passes.working.discard(self)
                        self.working = False
                        break
                    events, self._events = self._events, []
                self._carry_out(events, None, None, recording)
        self.profile.done(recording)
        current.set(scope)

    def _carry_out(
        self,
        events: list[Event],
        peer: int | None,
        answer: Answer | None,
        recording: Recording | None,
    ) -> None:
        for happen, arguments in events:
            happen(*arguments)
        by_peer: dict[int, list[Any]] = {}
        for to, message in self._to_send:
            by_peer.setdefault(to, []).append(message)
        self._to_send.clear()
        mine = by_peer.pop(peer, []) if answer is not None and peer is not None else []
        for to, messages in by_peer.items():
            profile = self.profile.leaving(recording, to == self.root)
            with profiled.sending(messages):
                self._passes.ask(self, to, messages, profile)
        if answer is not None:
            profile = self.profile.leaving(recording, peer == self.root)
            with profiled.sending(mine):
                answer(mine, profile)

    @property
    def idle(self) -> bool:
        """Nothing is expected to come any more; it is over, or only the root does not know yet that it is."""
        return self._pass.idle

    # ---- waiting

    def waiting_for(self) -> str:
        """What is outstanding, and where."""
        return self._pass.waiting_for()


def _put(to_send: list[tuple[int, tuple[Any, ...]]], peer: int, message: tuple[Any, ...]) -> None:
    to_send.append((peer, message))


class Question:
    """Messages on their way to a peer, whose answer is awaited. Called with what became of them."""

    __slots__ = ("call", "done", "peer", "run")

    def __init__(self, run: Running, peer: int) -> None:
        self.run = run
        self.peer = peer
        self.call = 0
        self.done = False

    def __call__(self, outcome: tuple[Any, ...]) -> None:
        self.done = True
        self.run._passes.answered(self.run, self.peer, outcome)


class Passes:
    """All passes of one worker.

    Args:
        worker: the worker.
        find: a context by its id, unless it has ended.
    """

    def __init__(self, worker: Any, find: Callable[[int], Context | None]) -> None:
        self.me: int = worker.info.id
        self.worker = worker
        self._find = find
        self._numbers = itertools.count(1)
        self._roots: set[Running] = set()  # those that are under way and began here
        self.working: set[Running] = set()  # those of others in which something runs at this moment

    @property
    def count(self) -> int:
        """How many are under way."""
        return len(self._roots) + len(self.working)

    # ---- at the root

    def backward(self, context: Context, roots: list[Tensor], retain_graph: bool) -> None:
        """Runs a pass to its end; see `telegrad.autograd.backward`."""
        worker = self.worker
        timeout = remaining(worker.calls.default_timeout, current.get())
        deadline = time.monotonic_ns() + timeout if timeout else 0
        run = Running(self, context, self.me, next(self._numbers), deadline)
        with context.lock:
            if context.ended:
                raise TelegradError(f"Could not find autograd context with id: {context.id}. It was left just now.")
            context.passes[self.me, run.number] = run
        self._roots.add(run)
        try:
            run.start(roots, retain_graph)
            if not run.end.over:
                if _get_running_loop() is not None:
                    with holding_up():
                        self._wait(run, timeout)
                else:
                    self._wait(run, timeout)
        except BaseException as e:  # a signal handler's
            run.abort(e)
            raise
        finally:
            self._roots.discard(run)
            run.profile.end()
            run.asked.clear()
            with context.lock:
                context.passes.pop((self.me, run.number), None)
        if run.end.error is not None:
            error, run.end.error = run.end.error, None
            raise error

    def _wait(self, run: Running, timeout: int) -> None:
        engine = self.worker.engine
        while not run.end.over:
            at = time.monotonic_ns()
            until = at + _LOOK
            if run.deadline:
                until = min(until, run.deadline)
                if until <= at:
                    self._time_is_over(run, timeout)
                    return
            if not run.asked:
                run.end.wait(until - at)
                continue
            question = run.asked[0]
            outcome = None if question.done else engine.wait(question.call, until - at)
            if outcome is not None:
                question(outcome)
            elif not question.done and time.monotonic_ns() >= until:
                continue  # there is no answer yet
            run.asked.popleft()  # it is here, or a thread of the pool has it

    def _time_is_over(self, run: Running, timeout: int) -> None:
        what = f"a backward pass in autograd context {run.context.id}"
        error = RpcTimeout(timeout / 1e9, what, f"waiting for {run.waiting_for()}", _REMEDY)
        run.abort(error)
        run.end.come(error)  # if another thread is in it, in a hook that does not return

    # ---- messages

    def ask(self, run: Running, peer: int, messages: list[Any], profile: profiled.Profile | None) -> None:
        """Sends a peer messages of a pass, and what there is to say to a profile."""
        context = run.context
        worker = self.worker
        timeout = 0
        if run.deadline:
            timeout = max(run.deadline - time.monotonic_ns(), 1)
        try:
            body = (context.id, run.root, run.number, self._oldest(context, run.root), messages)
            m = worker.messages.bare(peer, body)
            if profile is not None:
                m = worker.messages.with_report(m, profile)
            question = Question(run, peer)
            question.call = worker.engine.start(
                peer, _GRADIENTS, m.flags, 0, None, m.body, m.segments, timeout, True, True, True, question, None
            )
        except Exception as e:  # a gradient that cannot be sent, or the worker has been closed
            run.abort(e)
            return
        if run.root == self.me and question.call:
            run.asked.append(question)

    def _oldest(self, context: Context, root: int) -> int:
        """The lowest number of the root's passes in the context that is not over."""
        if root != self.me:
            return context.passes_over.get(root, 0)
        with context.lock:
            return min((number for who, number in context.passes if who == root), default=0)

    def answered(self, run: Running, peer: int, outcome: tuple[Any, ...]) -> None:
        """What became of messages to a peer."""
        status, tag, flags, body, segments, _, why = outcome
        if status == _REPLIED:
            try:
                if tag == _ERROR:
                    raise unpack_exception(body)
                if flags & _PREAMBLE:
                    run.profile.arrived(self.worker.messages.preamble(peer, flags, segments).profile)
                messages = self.worker.messages.decode(flags, body, segments, [])
            except Exception as e:
                run.abort(e)
                return
            if messages:
                run.messages(peer, messages)
        elif status not in (_TIMED_OUT, _STOPPED):  # the root keeps the time
            run.peer_lost(peer, why or "no connection")

    def on_request(self, asked: Any, flags: int, body: Any, segments: Any) -> None:
        """A peer sends messages of a pass, to be answered."""
        worker = self.worker
        handlers = worker.handlers
        try:
            profile = worker.messages.preamble(asked.peer, flags, segments).profile if flags & _PREAMBLE else None
            context_id, root, number, oldest, messages = worker.messages.decode(flags, body, segments, [])
            context = self._find(context_id)
            if context is None:
                raise TelegradError(
                    f"Could not find autograd context with id: {context_id}. It has been left, or this worker"
                    f" ({worker.info.name}) has lost what it knew of it."
                )
            run = self._part_of(context, root, number, oldest, asked.deadline)
        except Exception as e:
            handlers.fail(asked, e)
            return

        def answer(mine: list[Any], said: profiled.Profile | None) -> None:
            try:
                message = worker.messages.bare(asked.peer, mine)
                if said is not None:
                    message = worker.messages.with_report(message, said)
            except Exception as e:
                handlers.fail(asked, e)
            else:
                handlers.reply(asked, _GRADIENTS, message, 0)

        if run is None:
            answer([], None)
            return
        if profile is not None:
            run.profile.arrived(profile)
        run.messages(asked.peer, messages, answer)

    def _part_of(self, context: Context, root: int, number: int, oldest: int, deadline: int) -> Running | None:
        """This worker's part in a pass; None: that pass is over."""
        with context.lock:
            if root == self.me:
                return context.passes.get((root, number))
            if oldest > context.passes_over.get(root, 0):
                context.passes_over[root] = oldest
                gone = [context.passes.pop(key) for key in list(context.passes) if key[0] == root and key[1] < oldest]
            else:
                gone = []
            run = context.passes.get((root, number))
            if run is None and not context.ended and number >= context.passes_over.get(root, 0):
                run = context.passes[root, number] = Running(self, context, root, number, deadline)
        del gone
        return run

    # ---- the end

    def context_ended(self, context: Context, why: str) -> None:
        """What runs in it cannot go on."""
        with context.lock:
            runs, context.passes = list(context.passes.values()), {}
        for run in runs:
            if not run.idle:
                what = f"autograd context {context.id} has ended while a backward pass ran in it: {why}."
                run.abort(TelegradError(what))

    def peer_lost(self, context: Context, peer: int, why: str) -> None:
        """A worker is gone."""
        with context.lock:
            runs = list(context.passes.values())
        for run in runs:
            run.peer_lost(peer, why)

    def close(self) -> None:
        """The worker is closed: whoever waits here does so no longer."""
        for run in list(self._roots):
            run.end.come(NotInitialized(f"{NotInitialized.CALL} (A backward pass was under way when it shut down.)"))
