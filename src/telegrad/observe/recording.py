"""The called side: what runs for a request is recorded where it runs, and goes back with the reply.

Torch's legacy profiler does the recording. It is a thread's own and leaves other threads alone, so that many requests
are recorded at once and none of them slows another; Kineto is one for the whole process.
"""

import threading
import time
from contextvars import Token
from enum import IntFlag
from typing import Any

import torch

from telegrad.observe import torchs
from telegrad.observe.events import Event, clock_offset
from telegrad.worker import profiling
from telegrad.worker.profiling import Asked, Report

__all__ = ["Option", "Recording", "go_on", "pause"]


class Option(IntFlag):
    """What a profiler is to note of each operator."""

    SHAPES = 1
    MEMORY = 2
    STACK = 4
    FLOPS = 8
    MODULES = 16
    CUDA = 32

    @classmethod
    def of(cls, profile: Any) -> "Option":
        """What one of torch's profilers was asked to note."""
        options = cls(0)
        for option, name in _ATTRIBUTES.items():
            if getattr(profile, name, False):
                options |= option
        if getattr(profile, "use_cuda", False) or getattr(profile, "use_device", None) == "cuda":
            options |= cls.CUDA
        return options

    def config(self) -> Any:
        """For torch's legacy profiler."""
        cuda = Option.CUDA in self and torch.cuda.is_available()
        state = torchs.ProfilerState.CUDA if cuda else torchs.ProfilerState.CPU
        chosen = [
            option in self for option in (Option.SHAPES, Option.MEMORY, Option.STACK, Option.FLOPS, Option.MODULES)
        ]
        return torchs.ProfilerConfig(state, *chosen, torch._C._profiler._ExperimentalConfig())


_ATTRIBUTES = {
    Option.SHAPES: "record_shapes",
    Option.MEMORY: "profile_memory",
    Option.STACK: "with_stack",
    Option.FLOPS: "with_flops",
    Option.MODULES: "with_modules",
}


class _Here(threading.local):
    """The recordings that this thread is in, inner ones last: (recording, start of torch's profiler or None, token)."""

    def __init__(self) -> None:
        self.entered: list[tuple[Recording, int | None, Token[Any]]] = []
        self.paused: list[Recording | None] = []


_here = _Here()


class Recording:
    """What is recorded of one request. A context manager: threads enter it while something runs for the request.

    Args:
        profiler: that is told when it ends.
        node: the id of the worker that answers.
        asked: what the request says; None if only this process wants to know.
        options: what to note.
        session: of this process, that it is for; it is then of no request.
    """

    def __init__(self, profiler: Any, node: int, asked: Asked | None, options: Option, session: Any = None) -> None:
        self.node = node
        self.session = session
        self.options = options
        self.events: list[Event] = []
        self._asked = asked
        self._profiler = profiler
        self._received = time.time_ns()
        self._ended = False

    def __enter__(self) -> None:
        start = None if self._ended else _start(self.options)
        _here.entered.append((self, start, profiling.recording.set(self)))

    def __exit__(self, *error: object) -> None:
        _, start, token = _here.entered.pop()
        profiling.recording.reset(token)
        if start is not None:
            self._take(start)

    def drain(self) -> list[Any]:
        """What has been recorded so far, also by this thread, if it is inside; it goes on. Servers' profiles get it."""
        for place in self._leave():
            _, _, token = _here.entered[place]
            _here.entered[place] = (self, _start(self.options), token)
        events, self.events = self.events, []
        self._profiler.served_by(events)
        return [tuple(event) for event in events]

    def _leave(self) -> list[int]:
        """What this thread has done so far counts. Where it was inside, and is no longer recorded."""
        places = []
        for place, (recording, start, token) in enumerate(_here.entered):
            if recording is self and start is not None:
                _here.entered[place] = (recording, None, token)
                self._take(start)
                places.append(place)
        return places

    def join(self, name: str, began: int, events: list[Any]) -> None:
        """Other workers have done this for something of that name, which began at that time, in ns since the epoch."""
        if not events:
            return
        found = [Event(*event) for event in events]
        first, last = min(event.start for event in found), max(event.end for event in found)
        offset = clock_offset(began, first, last, time.time_ns())
        self.events += [event.seen_by_caller(name, offset) for event in found]

    def leave_beside(self) -> None:
        """Whoever made it with `beside` needs it no longer."""
        if self.session is not None:
            self.report()

    def _take(self, start: int) -> None:
        events = _stop(start, self.node)
        if not self._ended:
            self.events += events

    def report(self) -> Report | None:
        if not self._ended:
            self._leave()
            self._ended = True
            self._profiler.recorded(self)
        if self._asked is None:
            return None
        return self._asked[0], self._received, time.time_ns(), [tuple(event) for event in self.events]


def pause() -> None:
    """A profiler of the program's own is about to begin in this thread, which can have only one."""
    paused: Recording | None = None
    if _here.entered:
        inner, start, token = _here.entered[-1]
        if start is not None:
            _here.entered[-1] = (inner, None, token)
            inner._take(start)
            paused = inner
    _here.paused.append(paused)


def go_on() -> None:
    """It has ended."""
    paused = _here.paused.pop() if _here.paused else None
    if paused is not None and _here.entered and _here.entered[-1][0] is paused:
        recording, _, token = _here.entered[-1]
        _here.entered[-1] = (recording, _start(recording.options), token)


def _start(options: Option) -> int | None:
    """Switches torch's profiler on in this thread: when that was, in ns since the epoch. None: there is none, or it is
    another's."""
    if torchs.legacy is None or torchs.profiler_enabled():
        return None
    torchs.enable_legacy(options.config())
    return time.time_ns()


def _stop(start: int, node: int) -> list[Event]:
    """Switches it off, and says what it has seen."""
    try:
        records = torchs.disable_legacy()
    except RuntimeError:  # what ran here has switched it off, as a profiler of its own
        return []
    whole = [_without_strays(thread) for thread in records]
    return [Event.of(event, node, start) for event in torchs.legacy._parse_legacy_records(whole)]


def _without_strays(records: list[Any]) -> list[Any]:
    """Without the ends of ranges that had begun before."""
    begun: set[Any] = set()
    kept = []
    for record in records:
        key = record.handle(), record.node_id()
        if record.kind() == "push":
            begun.add(key)
        elif record.kind() == "pop" and key not in begun:
            continue
        kept.append(record)
    return kept
