"""A backward pass on one worker: its threads run the events of a `BackwardPass`.

A thread that brings events for a pass, such as a message or the loss of a worker, runs them unless another thread is in
the pass; then that thread runs them. `manager.py` sends the messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from torch import Tensor

from telegrad.autograd.context import Profile, ReplyCallback, WireMessage
from telegrad.autograd.passes.backward_pass import BackwardPass
from telegrad.autograd.passes.profile import NOTHING, PassProfile, receive_range, send_range
from telegrad.worker import Worker
from telegrad.worker.calls import tracing
from telegrad.worker.calls.client import Completion
from telegrad.worker.scope import Scope, current

if TYPE_CHECKING:
    from telegrad.autograd.context import Context, Entry
    from telegrad.autograd.execution.wanted import Wanted
    from telegrad.worker.calls.tracing import Recording

__all__ = ["PassResult", "PassTask", "PendingRequest"]


Event: TypeAlias = tuple[Callable[..., None], *tuple[object, ...]]  # a method of a pass, and its arguments


class PassResult:
    """Result of a pass at its root, for the one thread that waits for it."""

    done: bool = False
    error: BaseException | None = None
    _event: threading.Event | None = None

    def set(self, error: BaseException | None) -> None:
        """End the pass, with an error or without; later calls have no effect."""
        if self.done:
            return
        self.error = error
        self.done = True  # before `_event` is read: `wait` reads it after it has set `_event`
        if self._event is not None:
            self._event.set()

    def wait(self, nanoseconds: int) -> None:
        """Block until the pass has ended, or the timeout has expired."""
        if self._event is None:
            self._event = threading.Event()
        if not self.done:
            self._event.wait(nanoseconds / 1e9)


class MessageSender(Protocol):
    """The manager's interface for its passes (`manager.py`)."""

    worker: Worker
    worker_id: int
    active_tasks: set[PassTask]

    def send(self, task: PassTask, peer: int, messages: list[WireMessage], profile: Profile | None) -> None:
        """Send messages of a pass to a peer."""

    def on_reply(self, task: PassTask, peer: int, completion: Completion) -> None:
        """Process the completion of such a request."""


class PassTask:
    """Task that runs a pass on this worker.

    At most one thread is in it, and also runs the events that other threads bring meanwhile.

    Args:
        manager: Sends its messages.
        context: The context of the pass.
        root: Id of the worker that called `backward`.
        number: Number of the pass among those of the root.
        deadline: Monotonic ns at which the root gives up; 0: never.
    """

    __slots__ = (
        *("context", "deadline", "manager", "number", "pending_requests", "profile", "result", "root"),
        *("_events", "_lock", "_pass", "_to_send"),
    )

    def __init__(self, manager: MessageSender, context: Context, root: int, number: int, deadline: int) -> None:
        self.context = context
        self.root = root
        self.number = number
        self.deadline = deadline
        self.pending_requests: deque[PendingRequest] = deque()  # at the root: for its thread to wait for
        self.result: PassResult = PassResult()
        self.manager = manager
        self._lock = threading.Lock()  # held by the thread that is in the pass
        self._events: deque[Event] = deque()
        self._to_send: list[tuple[int, WireMessage]] = []
        worker = manager.worker
        self.profile: PassProfile | None = None
        if tracing.observer.on or tracing.observer.serving:  # a later message may also request one
            self._ensure_profile()
        # The pass does not refer to this task: a reference cycle would wait for the garbage collector.
        self._pass = BackwardPass(
            worker.info,
            context,
            number,
            root,
            self._to_send.append,
            self.result.set,
            worker.members.name_of,
            worker.members.lost_incarnation,
            worker.messages.gate,
        )

    # ---- events

    def start(
        self,
        roots: Sequence[Entry],
        retain_graph: bool,
        gradients: Sequence[Tensor | None] | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        """Begin the pass, at the root; see `BackwardPass.start`."""
        self._add_events((self._pass.start, roots, retain_graph, gradients, wanted))

    def on_messages(self, peer: int, messages: list[WireMessage], reply: ReplyCallback | None = None) -> None:
        """Process messages of a peer.

        Args:
            peer: The peer.
            messages: Its messages.
            reply: Called once, soon, with the messages for that peer.
        """
        on_message = self._pass.on_message
        if len(messages) == 1:
            self._add_events((on_message, peer, messages[0]), peer=peer, reply=reply)
        else:
            self._add_events(*[(on_message, peer, message) for message in messages], peer=peer, reply=reply)

    def peer_lost(self, peer: int, why: str) -> None:
        """Process the loss of a worker."""
        self._add_events((self._pass.peer_lost, peer, why))

    def peer_unreachable(self, peer: int, why: str) -> None:
        """Process an undelivered message: there is no session with the worker."""
        self._add_events((self._pass.peer_unreachable, peer, why))

    def abort(self, error: BaseException) -> None:
        """End the pass with an error."""
        self._add_events((self._pass.abort, error))

    def _add_events(self, *added: Event, peer: int | None = None, reply: ReplyCallback | None = None) -> None:
        """Queue events, and run all queued events unless another thread is in the pass."""
        events = self._events
        events += added
        lock = self._lock
        while events and lock.acquire(False):
            try:
                if self.profile is None and not tracing.observer.serving:
                    self._run_events(peer, reply, None)
                else:
                    recording = self._ensure_profile().begin_recording()
                    with recording or NOTHING:
                        self._run_events(peer, reply, recording)
                    self._ensure_profile().end_recording(recording)
                reply = None
            finally:
                lock.release()
        if reply is not None:
            reply([], None)

    def _run_events(self, peer: int | None, reply: ReplyCallback | None, recording: Recording | None) -> None:
        events, to_send, manager = self._events, self._to_send, self.manager
        scope = current.get()
        if scope is None or scope.autograd is not self.context:  # calls of hooks belong to the context
            request = scope is not None and scope.request
            limits = manager.worker.options.inherit_from_caller
            current.set(Scope(manager.worker, self.deadline, 1, request, self.context, limits_calls=limits))
        if self.root != manager.worker_id:
            manager.active_tasks.add(self)
        try:
            while True:
                for _ in range(len(events)):
                    event = events.popleft()
                    if tracing.observer.on:
                        with receive_range(self._message_of(event)):
                            event[0](*event[1:])
                    else:
                        event[0](*event[1:])
                for_peer: list[WireMessage] = []
                if to_send:
                    by_peer: dict[int, list[WireMessage]] = {}
                    for to, message in to_send:
                        if to in by_peer:
                            by_peer[to].append(message)
                        else:
                            by_peer[to] = [message]
                    to_send.clear()
                    if reply is not None and peer is not None:
                        for_peer = by_peer.pop(peer, for_peer)
                    for to, messages in by_peer.items():
                        if self.profile is None:
                            manager.send(self, to, messages, None)
                        else:
                            self._send_recorded(partial(manager.send, self, to), messages, to, recording)
                if reply is not None:
                    if self.profile is None:
                        reply(for_peer, None)
                    else:
                        self._send_recorded(reply, for_peer, peer, recording)
                    reply = None
                if not events:
                    return
        finally:
            if self.root != manager.worker_id:
                manager.active_tasks.discard(self)
            current.set(scope)

    @property
    def is_idle(self) -> bool:
        """Whether no further message is expected, except notifications of the end."""
        return self._pass.is_idle

    @property
    def participants(self) -> set[int]:
        """At the root: other workers that may keep their parts of a pass that is over."""
        return self._pass.participants

    # ---- profiles

    def _send_recorded(
        self, send: ReplyCallback, messages: list[WireMessage], to: int | None, recording: Recording | None
    ) -> None:
        profile = None if self.profile is None else self.profile.for_message(recording, to == self.root)
        if tracing.observer.on:
            with send_range(messages):
                send(messages, profile)
        else:
            send(messages, profile)

    def _message_of(self, event: Event) -> WireMessage | None:
        return cast("tuple[object, int, WireMessage]", event)[2] if event[0] == self._pass.on_message else None

    def _ensure_profile(self) -> PassProfile:
        if self.profile is None:
            self.profile = PassProfile(self.manager.worker.calls, self.root == self.manager.worker_id)
        return self.profile

    def on_profile(self, profile: Profile) -> None:
        """Process the profile that a message carried."""
        self._ensure_profile().on_profile(profile)

    # ---- waiting

    def describe_pending(self) -> str:
        """Describe what the root waits for, and from which workers."""
        return self._pass.describe_pending()


class PendingRequest:
    """Completion target of messages that were sent to a peer."""

    call: int = 0
    done: bool = False
    peer: int
    task: PassTask

    def __call__(self, completion: Completion) -> None:
        self.done = True
        self.task.manager.on_reply(self.task, self.peer, completion)
