"""Recordings of requests on the callee, which returns them with the reply.

Torch's legacy profiler does the recording. It records a single thread and does not affect others, which allows many
recordings at once. Kineto is one for the whole process.
"""

import threading
import time
from contextvars import Token
from enum import IntFlag
from typing import Any

import torch

from telegrad.observe import torch_profiler
from telegrad.observe.events import Event, clock_offset
from telegrad.worker.calls import tracing
from telegrad.worker.calls.tracing import Report, TraceContext

__all__ = ["Option", "Recording", "pause", "resume"]


class Option(IntFlag):
    """Options of a profiler: what to record of each operator."""

    SHAPES = 1
    MEMORY = 2
    STACK = 4
    FLOPS = 8
    MODULES = 16
    CUDA = 32

    @classmethod
    def of(cls, profile: object) -> "Option":
        """Return the options of one of torch's profilers."""
        options = cls(0)
        for option, name in _ATTRIBUTES.items():
            if getattr(profile, name, False):
                options |= option
        if getattr(profile, "use_cuda", False) or getattr(profile, "use_device", None) == "cuda":
            options |= cls.CUDA
        return options

    def config(self) -> object:
        """Return the configuration for torch's legacy profiler."""
        cuda = Option.CUDA in self and torch.cuda.is_available()
        state = torch_profiler.ProfilerState.CUDA if cuda else torch_profiler.ProfilerState.CPU
        chosen = [
            option in self for option in (Option.SHAPES, Option.MEMORY, Option.STACK, Option.FLOPS, Option.MODULES)
        ]
        return torch_profiler.ProfilerConfig(state, *chosen, torch._C._profiler._ExperimentalConfig())


_ATTRIBUTES = {
    Option.SHAPES: "record_shapes",
    Option.MEMORY: "profile_memory",
    Option.STACK: "with_stack",
    Option.FLOPS: "with_flops",
    Option.MODULES: "with_modules",
}


class _Here(threading.local):
    """Recordings that this thread has entered, the innermost last.

    An entry is (recording, start of torch's profiler or None, token).
    """

    def __init__(self) -> None:
        self.entered: list[tuple[Recording, int | None, Token[tracing.Recording | None]]] = []
        self.paused: list[Recording | None] = []


_here = _Here()


class Recording:
    """Recording of one request; a context manager.

    Threads enter it while they work for the request. Only then does it count as active: the request may never end.

    Args:
        profiler: notified when a thread enters or leaves the recording, and when it ends.
        node: id of the callee.
        trace: what the request asks to record; None if only this process records.
        options: what to record of each operator.
        session: the session of this process to which the recording belongs, if it belongs to no request.
    """

    def __init__(
        self, profiler: Any, node: int, trace: TraceContext | None, options: Option, session: Any = None
    ) -> None:
        self.node = node
        self.session = session
        self.options = options
        self.events: list[Event] = []
        self._trace = trace
        self._profiler = profiler
        self._received = time.time_ns()
        self._ended = False

    def __enter__(self) -> None:
        start = None if self._ended else _start(self.options)
        _here.entered.append((self, start, tracing.recording.set(self)))
        self._profiler.count(1)

    def __exit__(self, *error: object) -> None:
        self._profiler.count(-1)
        _, start, token = _here.entered.pop()
        tracing.recording.reset(token)
        if start is not None:
            self._take(start)

    def drain(self) -> list[object]:
        """Return the events recorded so far, and continue recording.

        Events of this thread are included if it is inside. Servers' profiles get the events too.
        """
        for place in self._leave():
            _, _, token = _here.entered[place]
            _here.entered[place] = (self, _start(self.options), token)
        events, self.events = self.events, []
        self._profiler.served_by(events)
        return [tuple(event) for event in events]

    def _leave(self) -> list[int]:
        """Add this thread's events so far, and stop its recording.

        Return the positions at which this thread was recording.
        """
        places = []
        for place, (recording, start, token) in enumerate(_here.entered):
            if recording is self and start is not None:
                _here.entered[place] = (recording, None, token)
                self._take(start)
                places.append(place)
        return places

    def join(self, name: str, began: int, events: list[Any]) -> None:
        """Add events of other workers under a name that began at `began` (ns since epoch)."""
        if not events:
            return
        found = [Event(*event) for event in events]
        first, last = min(event.start for event in found), max(event.end for event in found)
        offset = clock_offset(began, first, last, time.time_ns())
        self.events += [event.seen_by_caller(name, offset) for event in found]

    def end_side_recording(self) -> None:
        """End a recording of a side thread."""
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
        if self._trace is None:
            return None
        return self._trace[0], self._received, time.time_ns(), [tuple(event) for event in self.events]


def pause() -> None:
    """Pause this thread's recording before a profiler of the program starts.

    A thread can have only one profiler.
    """
    paused: Recording | None = None
    if _here.entered:
        inner, start, token = _here.entered[-1]
        if start is not None:
            _here.entered[-1] = (inner, None, token)
            inner._take(start)
            paused = inner
    _here.paused.append(paused)


def resume() -> None:
    """Resume the recording after the profiler of the program has ended."""
    paused = _here.paused.pop() if _here.paused else None
    if paused is not None and _here.entered and _here.entered[-1][0] is paused:
        recording, _, token = _here.entered[-1]
        _here.entered[-1] = (recording, _start(recording.options), token)


def _start(options: Option) -> int | None:
    """Start torch's profiler in this thread and return the time in ns since the epoch.

    Return None if torch has no legacy profiler, or another profiler is active.
    """
    if torch_profiler.legacy is None or torch_profiler.profiler_enabled():
        return None
    torch_profiler.enable_legacy(options.config())
    return time.time_ns()


def _stop(start: int, node: int) -> list[Event]:
    """Stop torch's profiler and return its events."""
    try:
        records = torch_profiler.disable_legacy()
    except RuntimeError:  # the code that was run has stopped it, as its own profiler
        return []
    whole = [_without_strays(thread) for thread in records]
    return [Event.of(event, node, start) for event in torch_profiler.legacy._parse_legacy_records(whole)]


def _without_strays(records: list[Any]) -> list[Any]:
    """Remove the ends of ranges that had begun before."""
    begun: set[tuple[int, int]] = set()
    kept = []
    for record in records:
        key = record.handle(), record.node_id()
        if record.kind() == "push":
            begun.add(key)
        elif record.kind() == "pop" and key not in begun:
            continue
        kept.append(record)
    return kept
