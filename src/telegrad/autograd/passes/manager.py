"""Backward passes of one worker, and their messages on the network.

The messages of a pass travel as requests; the reply carries the peer's messages for the sender. So a pass over two
workers is one call: the thread that waits in `backward` reads the reply itself, and the thread that reads the request
runs it. Messages for a third worker are requests to that worker.

Each message names the pass by context, root and number, and the lowest number that is not over at the root. A worker
drops its state of earlier passes, and ignores their late messages.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from torch import Tensor

from telegrad.autograd.context import ActivePass, Context, Entry, Profile, WireMessage
from telegrad.autograd.contexts import Contexts
from telegrad.autograd.execution.wanted import Wanted, entry_of
from telegrad.autograd.graph.local_graph import ends_of
from telegrad.autograd.passes.comm_hooks import CommHooks, decompress
from telegrad.autograd.passes.task import PassTask, PendingRequest
from telegrad.autograd.plain.records import PlainContext
from telegrad.errors import NotInitialized, RpcTimeout, TelegradError, WorkerLost
from telegrad.wire.ints import (
    FLAG_METADATA,
    STATUS_CANCELED,
    STATUS_PEER_LOST,
    STATUS_STOPPED,
    STATUS_TIMED_OUT,
    STATUS_UNREACHABLE,
    TAG_GRADIENTS,
)
from telegrad.worker import Worker
from telegrad.worker.blocking import check_blocking, this_thread
from telegrad.worker.calls.client import Completion
from telegrad.worker.native import NOT_ENCODABLE, OtherReply
from telegrad.worker.scope import current, remaining
from telegrad.worker.serving.request_info import RequestInfo

__all__ = ["BackwardManager"]

_GRADIENTS_LABEL = "the gradients of a backward pass"  # for errors
_LOST = (STATUS_PEER_LOST, STATUS_CANCELED)
_CHECK_INTERVAL = 20_000_000  # ns; a thread that waits for one reply checks this often whether the pass has ended
_REMEDY = (
    "If it may take that long, give init_rpc's options a larger rpc_timeout (0 for no limit); in a handler its"
    " caller's timeout counts as well."
)


class BackwardManager:
    """Manager of the passes of one worker.

    Args:
        worker: The worker.
        contexts: Its autograd contexts.
        first: Start of the numbers of passes. A process has higher ones than those before it under its name, so late
            messages of an earlier process end no pass of it.
    """

    def __init__(self, worker: Worker, contexts: Contexts, first: int) -> None:
        self.worker_id: int = worker.info.id
        self.worker = worker
        self._contexts = contexts
        self.comm_hooks: CommHooks = CommHooks(worker.members.name_of)
        self._last_number = first  # of the passes that this worker began
        self._number_lock = threading.Lock()
        self._roots: set[PassTask] = set()  # passes that this worker began and that are not over
        self.active_tasks: set[PassTask] = set()  # passes of other roots with a thread in them

    @property
    def count(self) -> int:
        """Number of passes in progress."""
        return len(self._roots) + len(self.active_tasks)

    # ---- at the root

    def backward(
        self,
        context: Context,
        roots: Sequence[Entry],
        retain_graph: bool,
        gradients: Sequence[Tensor | None] | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        """Run a pass to its end; see `autograd.backward` and `BackwardPass.start`."""
        if hasattr(this_thread, "worker") and ends_of([entry_of(root) for root in roots]):  # not a local pass
            check_blocking("a backward pass", "`await asyncio.to_thread(...)` for it")
        worker = self.worker
        timeout = worker.calls.default_timeout
        scope = current.get()
        if scope is not None and scope.deadline:
            timeout = remaining(timeout, scope)
        deadline = time.monotonic_ns() + timeout if timeout else 0
        with context.lock:
            if context.ended:
                raise TelegradError(f"Could not find autograd context with id: {context.id}. It was left just now.")
            with self._number_lock:  # within the other: passes appear in the order of their numbers (`_min_live`)
                number = self._last_number = self._last_number + 1
            task = context.passes[self.worker_id, number] = PassTask(self, context, self.worker_id, number, deadline)
        self._roots.add(task)
        try:
            task.start(roots, retain_graph, gradients, wanted)
            if not task.result.done:
                self._wait(task, timeout)
        except BaseException as e:  # raised by a signal handler
            task.abort(e)
            raise
        finally:
            self._roots.discard(task)
            if task.profile is not None:
                task.profile.end()
            task.pending_requests.clear()
            with context.lock:
                context.passes.pop((self.worker_id, task.number), None)
            if isinstance(context, PlainContext):
                context.notify_finished(task.participants)
        if task.result.error is not None:
            error, task.result.error = task.result.error, None
            raise error

    def _wait(self, task: PassTask, timeout: int) -> None:
        await_reply = self.worker.calls.client.await_gradients
        while not task.result.done:
            now = time.monotonic_ns()
            until = now + _CHECK_INTERVAL
            if task.deadline:
                until = min(until, task.deadline)
                if until <= now:
                    self._time_out(task, timeout)
                    return
            if not task.pending_requests:
                task.result.wait(until - now)
                continue
            request = task.pending_requests[0]
            reply = None if request.done else await_reply(request.call, until - now)
            if type(reply) is OtherReply:
                request(cast("Completion", reply.completion))
            elif reply:
                task.on_messages(request.peer, cast("list[WireMessage]", reply))
            elif reply is None and not request.done and time.monotonic_ns() >= until:
                continue  # no reply yet
            task.pending_requests.popleft()  # processed, or taken by a pool thread

    def _time_out(self, task: PassTask, timeout: int) -> None:
        what = "a backward pass without a context"
        if not task.context.is_plain:
            what = f"a backward pass in autograd context {task.context.id}"
        error = RpcTimeout(timeout / 1e9, what, f"waiting for {task.describe_pending()}", _REMEDY)
        task.abort(error)
        task.result.set(error)  # another thread may be in the pass, inside a hook that does not return

    # ---- messages

    def send(self, task: PassTask, peer: int, messages: list[WireMessage], profile: Profile | None) -> None:
        """Send messages of a pass, and an optional profile, to a peer."""
        context = task.context
        worker = self.worker
        timeout = 0
        if task.deadline:
            timeout = max(task.deadline - time.monotonic_ns(), 1)
        try:
            if self.comm_hooks.hooks:
                messages = self.comm_hooks.compress(peer, messages)
            body = (context.id, task.root, task.number, self._min_live(context, task.root, task.number), messages)
            request = PendingRequest()
            request.task, request.peer = task, peer
            send = worker.calls.client.send_gradients
            call = NOT_ENCODABLE if profile is not None else send(peer, body, timeout, request)
            if call == NOT_ENCODABLE:
                encoded = worker.messages.encode_internal(peer, body)
                if profile is not None:
                    encoded = worker.messages.with_trace(encoded, profile)
                call = send(peer, body, timeout, request, encoded)
        except BaseException as e:  # a gradient that cannot be sent, or the worker has been closed
            task.abort(e)
            return
        if task.root == self.worker_id and call:
            request.call = call
            task.pending_requests.append(request)

    def _min_live(self, context: Context, root: int, number: int) -> int:
        """Return the lowest number of the root's passes in the context that is not over."""
        if root != self.worker_id:
            return context.min_live_pass.get(root, 0)
        if list(context.passes) == [(root, number)]:
            return number
        with context.lock:  # the pass itself may be over, and an earlier one may not
            return min((number for other, number in context.passes if other == root), default=0)

    def _decompress(self, messages: list[WireMessage]) -> list[WireMessage]:
        return decompress(messages, self.worker.handlers.exposure.callee_of)

    def on_reply(self, task: PassTask, peer: int, completion: Completion) -> None:
        """Process the completion of a request with messages to a peer."""
        status, *_, why, _ = completion
        if status == STATUS_UNREACHABLE:
            task.peer_unreachable(peer, why or "no connection")
        elif status in _LOST:
            task.peer_lost(peer, why or "no connection")
        elif status not in (STATUS_TIMED_OUT, STATUS_STOPPED):  # the root checks its deadline
            self._on_reply(task, peer, completion)

    def _on_reply(self, task: PassTask, peer: int, completion: Completion) -> None:
        """Process the reply, or the error of a request that has not been sent."""
        try:
            _, packed = self.worker.calls.read(completion, (peer, _GRADIENTS_LABEL, 0), TAG_GRADIENTS, task.on_profile)
            messages = self._decompress(packed)
        except BaseException as e:
            task.abort(e)
            return
        if messages:
            task.on_messages(peer, messages)

    def on_request(self, request: RequestInfo, flags: int, body: bytes, segments: list[object]) -> None:
        """Process messages of a pass from a peer, and reply."""
        worker = self.worker
        handlers = worker.handlers
        try:
            profile = (
                worker.messages.read_metadata(request.peer, request.connection, flags, segments).profile
                if flags & FLAG_METADATA
                else None
            )
            context_id, root, number, min_live, packed = worker.messages.decode(flags, body, segments, [])
            messages = self._decompress(packed)
            context = self._contexts.find(context_id)
            if context is None:
                raise self._unknown_context(context_id, request.peer)
            task = self._pass_of(context, root, number, min_live, request.deadline)
        except BaseException as e:
            handlers.fail(request, e)
            return

        if task is None:
            self._reply_without_pass(request, context)
            return
        if profile is not None:
            task.on_profile(profile)
        task.on_messages(request.peer, messages, partial(self._reply_slow, request))

    def on_gradients(
        self, peer: int, connection: int, call: int, deadline: int, body: tuple[int, int, int, int, list[WireMessage]]
    ) -> None:
        """Process messages of a pass that the codec has decoded."""
        context_id, root, number, min_live, messages = body
        context = self._contexts.find(context_id)
        task = None if context is None else self._pass_of(context, root, number, min_live, deadline)
        if task is None:
            request = RequestInfo(peer, connection, call, deadline)
            if context is None:
                self.worker.handlers.fail(request, self._unknown_context(context_id, peer))
            else:
                self._reply_without_pass(request, context)
            return
        task.on_messages(peer, messages, partial(self._reply, peer, connection, call))

    def _reply(
        self, peer: int, connection: int, call: int, messages: list[WireMessage], profile: Profile | None
    ) -> None:
        slow = profile is not None or bool(self.comm_hooks.hooks)
        if slow or not self.worker.server.reply(connection, call, messages):
            self._reply_slow(RequestInfo(peer, connection, call, 0), messages, profile)

    def _unknown_context(self, context_id: int, peer: int) -> TelegradError:
        loss = self._contexts.find_loss(context_id, peer)
        if loss is not None:
            return loss
        name = self.worker.info.name
        if self.worker.references.epoch_of(peer) > 0:  # a session with the peer has ended
            why = f"its records of the autograd context {context_id} ended with an earlier connection"
            return WorkerLost(name, why, self.worker.incarnation)
        return TelegradError(
            f"Could not find autograd context with id: {context_id}. It has been left, or this worker ({name}) has lost"
            " its records."
        )

    def _reply_without_pass(self, request: RequestInfo, context: Context) -> None:
        """Reply to messages of a pass that is over, maybe by a loss."""
        if context.lost_worker is None:
            self._reply_slow(request, [], None)
        else:
            self.worker.handlers.fail(request, self._unknown_context(context.id, request.peer))

    def _reply_slow(self, request: RequestInfo, messages: list[WireMessage], profile: Profile | None) -> None:
        encoder, handlers = self.worker.messages, self.worker.handlers
        try:
            if self.comm_hooks.hooks:
                messages = self.comm_hooks.compress(request.peer, messages)
            message = encoder.encode_internal(request.peer, messages)
            if profile is not None:
                message = encoder.with_trace(message, profile)
        except BaseException as e:
            handlers.fail(request, e)
        else:
            handlers.reply(request, TAG_GRADIENTS, message, 0)

    def _pass_of(self, context: Context, root: int, number: int, min_live: int, deadline: int) -> ActivePass | None:
        """Return this worker's task of a pass, or None if the pass is over."""
        with context.lock:
            if root == self.worker_id:
                return context.passes.get((root, number))
            dropped = _drop_finished(context, root, min_live)
            task = context.passes.get((root, number))
            is_lost = context.ended or (context.is_plain and root in self.worker.members.lost)
            if task is None and not is_lost and number >= context.min_live_pass.get(root, 0):
                task = context.passes[root, number] = PassTask(self, context, root, number, deadline)
        del dropped
        return task

    # ---- the end

    def min_live(self, context: Context) -> int:
        """Return the lowest number of this root's passes that is not over."""
        with context.lock:
            own = [number for root, number in context.passes if root == self.worker_id]
            return min(own, default=self._last_number + 1)

    def on_finished(self, context: Context, root: int, min_live: int) -> None:
        """Drop the passes of a root that are over."""
        with context.lock:
            dropped = _drop_finished(context, root, min_live)
        del dropped

    def on_context_end(self, context: Context, error: Callable[[], TelegradError]) -> None:
        """Abort the passes of a context that has ended; `error` makes an error for each."""
        with context.lock:
            tasks, context.passes = list(context.passes.values()), {}
        for task in tasks:
            if not task.is_idle:
                task.abort(error())

    def peer_lost(self, context: Context, peer: int, why: str) -> None:
        """Notify the passes of a context that a worker is lost."""
        with context.lock:
            tasks = list(context.passes.values())
            if context.is_plain:  # in others, they end with the context
                for key in [key for key in context.passes if key[0] == peer]:
                    del context.passes[key]
        for task in tasks:
            task.peer_lost(peer, why)

    def close(self) -> None:
        """End the waits of all roots: the worker is closed."""
        for task in list(self._roots):
            error = NotInitialized.closed("A backward pass was under way when it shut down.")
            task.result.set(error)


def _drop_finished(context: Context, root: int, min_live: int) -> list[ActivePass]:
    """Remove and return the passes of a root with a lower number, with the lock held."""
    if min_live <= context.min_live_pass.get(root, 0):
        return []
    context.min_live_pass[root] = min_live
    finished = [key for key in context.passes if key[0] == root and key[1] < min_live]
    return [context.passes.pop(key) for key in finished]
