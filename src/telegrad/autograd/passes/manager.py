"""All backward passes of one worker, and their messages on the network.

The messages of a pass travel as requests, and the reply brings what the peer has for the sender in turn. So a pass over
two workers is one call: the thread that waits in `backward` reads the answer itself, and the one that reads the request
runs it. A worker that has something to say to a third one asks that one likewise.

Each message names the pass, (context, root, number), and the lowest number that is not over at the root: what a worker
keeps of earlier passes goes then, and what comes of them late is ignored.
"""

import itertools
import time
from asyncio import _get_running_loop
from functools import partial
from typing import Any, cast

from torch import Tensor

from telegrad.autograd.context import ActivePass, Context
from telegrad.autograd.contexts import Contexts
from telegrad.autograd.passes import profile as profiled
from telegrad.autograd.passes.task import PassTask, PendingRequest
from telegrad.errors import NotInitialized, RpcTimeout, TelegradError
from telegrad.serialize.exceptions import unpack_exception
from telegrad.wire import Flag, Status, Tag
from telegrad.worker.calls.omission import error_of, too_large
from telegrad.worker.native import NOT_PLAIN, Unusual
from telegrad.worker.scope import current, remaining
from telegrad.worker.serving.event_loop import blocking_in_loop
from telegrad.worker.serving.handlers import RequestInfo

__all__ = ["BackwardManager"]

_GRADIENTS, _ERROR = int(Tag.GRADIENTS), int(Tag.ERROR)
_REPLIED, _TIMED_OUT, _STOPPED = int(Status.REPLIED), int(Status.TIMED_OUT), int(Status.STOPPED)
_TOO_LARGE = int(Status.TOO_LARGE)
_METADATA, _LEFT_OUT = int(Flag.METADATA), int(Flag.LEFT_OUT)
_LOOK = 20_000_000  # ns after which whoever waits for one worker's answer looks whether the pass has ended otherwise
_REMEDY = (
    "If it may take that long, give init_rpc's options a larger rpc_timeout (0 waits for ever); in a handler its"
    " caller's timeout counts as well."
)


class BackwardManager:
    """All passes of one worker.

    Args:
        worker: the worker.
        contexts: its autograd contexts.
    """

    def __init__(self, worker: Any, contexts: Contexts) -> None:
        self.me: int = worker.info.id
        self.worker = worker
        self._contexts = contexts
        self._numbers = itertools.count(1)
        self._roots: set[PassTask] = set()  # those that are under way and began here
        self.working: set[PassTask] = set()  # those of others in which something runs at this moment

    @property
    def count(self) -> int:
        """How many are under way."""
        return len(self._roots) + len(self.working)

    # ---- at the root

    def backward(self, context: Context, roots: list[Tensor], retain_graph: bool) -> None:
        """Runs a pass to its end; see `telegrad.autograd.backward`."""
        worker = self.worker
        timeout = worker.calls.default_timeout
        scope = current.get()
        if scope is not None and scope.deadline:
            timeout = remaining(timeout, scope)
        deadline = time.monotonic_ns() + timeout if timeout else 0
        with context.lock:
            if context.ended:
                raise TelegradError(f"Could not find autograd context with id: {context.id}. It was left just now.")
            number = next(self._numbers)  # with the lock: once a later one is seen, this one is, too (`_oldest`)
            run = context.passes[self.me, number] = PassTask(self, context, self.me, number, deadline)
        self._roots.add(run)
        try:
            run.start(roots, retain_graph)
            if not run.end.over:
                if _get_running_loop() is not None:
                    with blocking_in_loop():
                        self._wait(run, timeout)
                else:
                    self._wait(run, timeout)
        except BaseException as e:  # a signal handler's
            run.abort(e)
            raise
        finally:
            self._roots.discard(run)
            if run.profile is not None:
                run.profile.end()
            run.asked.clear()
            with context.lock:
                context.passes.pop((self.me, run.number), None)
        if run.end.error is not None:
            error, run.end.error = run.end.error, None
            raise error

    def _wait(self, run: PassTask, timeout: int) -> None:
        answer = self.worker.calls.client.answer
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
            found = None if question.done else answer(question.call, until - at)
            if type(found) is Unusual:
                question(cast("tuple[Any, ...]", found.outcome))
            elif found:
                run.messages(question.peer, cast("list[Any]", found))
            elif found is None and not question.done and time.monotonic_ns() >= until:
                continue  # there is no answer yet
            run.asked.popleft()  # it is here, or a thread of the pool has it

    def _time_is_over(self, run: PassTask, timeout: int) -> None:
        what = f"a backward pass in autograd context {run.context.id}"
        error = RpcTimeout(timeout / 1e9, what, f"waiting for {run.waiting_for()}", _REMEDY)
        run.abort(error)
        run.end.come(error)  # if another thread is in it, in a hook that does not return

    # ---- messages

    def ask(self, run: PassTask, peer: int, messages: list[Any], profile: profiled.Profile | None) -> None:
        """Sends a peer messages of a pass, and what there is to say to a profile."""
        context = run.context
        worker = self.worker
        timeout = 0
        if run.deadline:
            timeout = max(run.deadline - time.monotonic_ns(), 1)
        try:
            body = (context.id, run.root, run.number, self._oldest(context, run.root, run.number), messages)
            question = PendingRequest()
            question.run, question.peer = run, peer
            call = NOT_PLAIN if profile is not None else worker.calls.client.ask(peer, body, timeout, question)
            if call == NOT_PLAIN:
                m = worker.messages.encode_internal(peer, body)
                if profile is not None:
                    m = worker.messages.with_trace(m, profile)
                call = worker.engine.start(
                    peer, _GRADIENTS, m.flags, 0, None, m.body, m.segments, timeout, True, True, True, question, None
                )
        except BaseException as e:  # a gradient that cannot be sent, or the worker has been closed
            run.abort(e)
            return
        if run.root == self.me and call:
            question.call = call
            run.asked.append(question)

    def _oldest(self, context: Context, root: int, number: int) -> int:
        """The lowest number of the root's passes in the context that is not over."""
        if root != self.me:
            return context.min_live_pass.get(root, 0)
        if list(context.passes) == [(root, number)]:  # it is over itself, maybe, and an earlier one is not
            return number
        with context.lock:
            return min((number for who, number in context.passes if who == root), default=0)

    def answered(self, run: PassTask, peer: int, outcome: tuple[Any, ...]) -> None:
        """What became of messages to a peer."""
        status, tag, flags, body, segments, _, why = outcome
        if status == _REPLIED:
            try:
                if flags & _LEFT_OUT:
                    raise error_of(body, self._gradients_with(peer))
                if tag == _ERROR:
                    raise unpack_exception(body)
                if flags & _METADATA:
                    run.arrived(self.worker.messages.read_metadata(peer, flags, segments).profile)
                messages = self.worker.messages.decode(flags, body, segments, [])
            except BaseException as e:
                run.abort(e)
                return
            if messages:
                run.messages(peer, messages)
        elif status == _TOO_LARGE:
            run.abort(too_large(self._gradients_with(peer), why))
        elif status not in (_TIMED_OUT, _STOPPED):  # the root keeps the time
            run.peer_lost(peer, why or "no connection")

    def _gradients_with(self, peer: int) -> str:
        return f"gradients that workers {self.worker.info.name} and {self.worker.name_of(peer)} exchange"

    def on_request(self, asked: Any, flags: int, body: Any, segments: Any) -> None:
        """A peer sends messages of a pass, to be answered."""
        worker = self.worker
        handlers = worker.handlers
        try:
            profile = worker.messages.read_metadata(asked.peer, flags, segments).profile if flags & _METADATA else None
            context_id, root, number, oldest, messages = worker.messages.decode(flags, body, segments, [])
            context = self._contexts.find(context_id)
            if context is None:
                raise self._unknown(context_id)
            run = self._part_of(context, root, number, oldest, asked.deadline)
        except BaseException as e:
            handlers.fail(asked, e)
            return

        if run is None:
            self._answer(asked, [], None)
            return
        if profile is not None:
            run.arrived(profile)
        run.messages(asked.peer, messages, partial(self._answer, asked))

    def on_gradients(self, peer: int, connection: int, call: int, deadline: int, message: Any) -> None:
        """The same, where there is nothing else in the message."""
        context_id, root, number, oldest, messages = message
        context = self._contexts.table.get(context_id)
        run = None if context is None else self._part_of(context, root, number, oldest, deadline)
        if run is None:
            asked = RequestInfo(peer, connection, call, deadline)
            if context is None:
                self.worker.handlers.fail(asked, self._unknown(context_id))
            else:
                self._answer(asked, [], None)
            return
        run.messages(peer, messages, partial(self._reply, peer, connection, call))

    def _reply(self, peer: int, connection: int, call: int, mine: list[Any], said: profiled.Profile | None) -> None:
        if said is not None or not self.worker.server.reply(connection, call, mine):
            self._answer(RequestInfo(peer, connection, call, 0), mine, said)

    def _unknown(self, context_id: int) -> TelegradError:
        return TelegradError(
            f"Could not find autograd context with id: {context_id}. It has been left, or this worker"
            f" ({self.worker.info.name}) has lost what it knew of it."
        )

    def _answer(self, asked: Any, mine: list[Any], said: profiled.Profile | None) -> None:
        messages, handlers = self.worker.messages, self.worker.handlers
        try:
            message = messages.encode_internal(asked.peer, mine)
            if said is not None:
                message = messages.with_trace(message, said)
        except BaseException as e:
            handlers.fail(asked, e)
        else:
            handlers.reply(asked, _GRADIENTS, message, 0)

    def _part_of(self, context: Context, root: int, number: int, oldest: int, deadline: int) -> ActivePass | None:
        """This worker's part in a pass; None: that pass is over."""
        with context.lock:
            if root == self.me:
                return context.passes.get((root, number))
            gone: list[ActivePass] = []
            if oldest > context.min_live_pass.get(root, 0):
                context.min_live_pass[root] = oldest
                if context.passes:
                    gone = [
                        context.passes.pop(key) for key in list(context.passes) if key[0] == root and key[1] < oldest
                    ]
            run = context.passes.get((root, number))
            if run is None and not context.ended and number >= context.min_live_pass.get(root, 0):
                run = context.passes[root, number] = PassTask(self, context, root, number, deadline)
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
