"""What a profile shows of a backward pass, under the names that torch's own has for it.

The root's operators run in the thread that calls `backward`, which is the one that is profiled, or in one of the pool,
whose events join that profile. The other workers record what they do for the pass, and send it to the root with the
message that tells the root of it, so it is there before the pass is over.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from telegrad.autograd.passes.backward_pass import GRADIENTS, BackwardPass
from telegrad.autograd.recording import RECV_NODE, SEND_NODE
from telegrad.worker.calls import tracing
from telegrad.worker.calls.client import Calls

__all__ = ["NOTHING", "PassProfile", "Profile", "sending", "taking", "whole"]

_BACKWARD = "torch::distributed::autograd::backward"

_PATIENCE = 0.1  # s
NOTHING = nullcontext()
Profile = tuple[int, list[Any]]  # in a message: what to note, and events for the root


_Range: TypeAlias = AbstractContextManager[Any]


def whole() -> _Range:
    """Around all of `backward`."""
    around: _Range = tracing.observer.range(_BACKWARD) if tracing.observer.on else NOTHING
    return around


def sending(messages: Sequence[tuple[Any, ...]]) -> _Range:
    """Around the sending of messages of a pass."""
    wanted = tracing.observer.on and any(message[0] == GRADIENTS for message in messages)
    around: _Range = tracing.observer.range(RECV_NODE) if wanted else NOTHING
    return around


def taking(event: tuple[Any, ...]) -> _Range:
    """Around what happens to a pass: (a method of it, its arguments)."""
    wanted = tracing.observer.on and event[0].__name__ == BackwardPass.on_message.__name__ and event[2][0] == GRADIENTS
    around: _Range = tracing.observer.range(SEND_NODE) if wanted else NOTHING
    return around


class PassProfile:
    """Of one pass on one worker. Nothing happens in it unless somebody profiles.

    Args:
        calls: of the worker.
        root: is this the thread and the worker of `backward`?
    """

    def __init__(self, calls: Calls, root: bool) -> None:
        observer = tracing.observer
        self._node = calls.worker_id
        self._root: tracing.Recording | None = observer.side_thread_recording(calls) if root and observer.on else None
        self._options: int | None = None if self._root is None else int(self._root.options)
        self._began = time.time_ns() if root else 0
        self._inside = 0
        self._left: Any = None if self._root is None else threading.Condition()

    def recording(self) -> tracing.Recording | None:
        """For a thread that is about to do something for the pass: to be entered, and then handed to `done`."""
        if self._root is not None:
            with self._left:
                self._inside += 1
            return self._root
        if self._options is None and not tracing.observer.serving:
            return None
        asked = None if self._options is None else (0, self._options)
        recording: tracing.Recording = tracing.observer.record(self._node, asked)
        return recording

    def done(self, recording: tracing.Recording | None) -> None:
        """The thread has done it."""
        if recording is None:
            return
        if recording is not self._root:
            recording.report()
            return
        with self._left:
            self._inside -= 1
            self._left.notify_all()

    def leaving(self, recording: tracing.Recording | None, to_root: bool) -> Profile | None:
        """What a message that leaves is to say; None for nothing."""
        events = recording.drain() if to_root and recording is not None else []
        return None if self._options is None else (self._options, events)

    def arrived(self, profile: Profile) -> None:
        """What a message has said."""
        options, events = profile
        if self._root is not None:
            self._root.join(_BACKWARD, self._began, events)
        elif not self._began:
            self._options = options

    def end(self) -> None:
        """At the root: the pass is over. The thread that has ended it may be inside still; one in a hook may stay."""
        if self._root is not None:
            with self._left:
                self._left.wait_for(lambda: not self._inside, _PATIENCE)
            self._root.end_side_recording()
