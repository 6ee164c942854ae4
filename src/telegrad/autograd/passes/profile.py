"""The profile of a backward pass, with torch's names for its parts.

The root's operators run in the thread that calls `backward`, which is profiled, or in pool threads, whose events are
added to that profile. The other workers record what they run for the pass. They send it to the root with the message
that reports their progress, so the root has all events before the pass is over.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from telegrad.autograd.context import Profile, WireMessage
from telegrad.autograd.passes.messages import GRADIENTS
from telegrad.autograd.recording import RECV_NODE, SEND_NODE
from telegrad.worker.calls import tracing
from telegrad.worker.calls.client import Calls

__all__ = ["NOTHING", "PassProfile", "backward_range", "receive_range", "send_range"]

_BACKWARD = "torch::distributed::autograd::backward"

_EXIT_GRACE = 0.1  # s for threads to leave the pass at its end; a thread inside a hook may take longer
NOTHING = nullcontext()


_Range: TypeAlias = AbstractContextManager[object]


def backward_range() -> _Range:
    """Return a profiler range around a call of `backward`."""
    around: _Range = tracing.observer.range(_BACKWARD) if tracing.observer.on else NOTHING
    return around


def send_range(messages: Sequence[WireMessage]) -> _Range:
    """Return a profiler range around sending messages of a pass."""
    recorded = tracing.observer.on and any(message[0] == GRADIENTS for message in messages)
    around: _Range = tracing.observer.range(RECV_NODE) if recorded else NOTHING
    return around


def receive_range(message: WireMessage | None) -> _Range:
    """Return a profiler range around processing a message; None is another event."""
    recorded = tracing.observer.on and message is not None and message[0] == GRADIENTS
    around: _Range = tracing.observer.range(SEND_NODE) if recorded else NOTHING
    return around


class PassProfile:
    """Profile of one pass on one worker. Records nothing unless a profiler is active.

    Args:
        calls: The calls of the worker.
        root: Whether this is the thread and the worker of `backward`.
    """

    def __init__(self, calls: Calls, root: bool) -> None:
        observer = tracing.observer
        self._node = calls.worker_id
        self._root: tracing.Recording | None = observer.side_thread_recording(calls) if root and observer.on else None
        self._options: int | None = None if self._root is None else int(self._root.options)
        self._start = time.time_ns() if root else 0
        self._threads = 0  # inside the root's recording
        self._all_left = threading.Condition()

    def begin_recording(self) -> tracing.Recording | None:
        """Return a recording for a thread to enter; the thread then calls `end_recording`."""
        if self._root is not None:
            with self._all_left:
                self._threads += 1
            return self._root
        if self._options is None and not tracing.observer.serving:
            return None
        trace = None if self._options is None else (0, self._options)
        recording: tracing.Recording = tracing.observer.record(self._node, trace)
        return recording

    def end_recording(self, recording: tracing.Recording | None) -> None:
        """End the work of a thread for the pass."""
        if recording is None:
            return
        if recording is not self._root:
            recording.report()
            return
        with self._all_left:
            self._threads -= 1
            self._all_left.notify_all()

    def for_message(self, recording: tracing.Recording | None, to_root: bool) -> Profile | None:
        """Return the profile that a message to another worker carries, if any."""
        events = recording.drain() if to_root and recording is not None else []
        return None if self._options is None else (self._options, events)

    def on_profile(self, profile: Profile) -> None:
        """Process the profile that a message carried."""
        options, events = profile
        if self._root is not None:
            self._root.join(_BACKWARD, self._start, events)
        elif not self._start:
            self._options = options

    def end(self) -> None:
        """End the profile, at the root, when the pass is over.

        The thread that has ended the pass may still be inside for a short time.
        """
        if self._root is not None:
            with self._all_left:
                self._all_left.wait_for(lambda: not self._threads, _EXIT_GRACE)
            self._root.end_side_recording()
