"""Recorded calls on the caller: their duration and their callees' reports."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from telegrad.observe.events import Event, clock_offset
from telegrad.observe.recording import Recording
from telegrad.observe.torch_profiler import record_function
from telegrad.worker.calls.callables import find_builtin, name_of
from telegrad.worker.calls.tracing import TraceContext

if TYPE_CHECKING:
    from telegrad.observe.sessions import Session

__all__ = ["SEPARATOR", "RecordedSpan", "SessionSpan", "Span", "call_key", "function_name"]

SEPARATOR = "telegrad::call"  # without it, the legacy profiler merges two consecutive calls of one name


def call_key(mode: str, function: str, source: str, destination: str) -> str:
    """Return the name of a call in a profile, as in torch.

    Args:
        mode: sync, async or remote; or to_here, which calls no function.
        function: name of the function.
        source, destination: names of workers.

    Example::

        key = observe.call_key("sync", "load", "worker0", "worker1")  # rpc_sync#load(worker0 -> worker1)
    """
    if mode == "to_here":
        return f"to_here#({source})->({destination})"
    return f"rpc_{mode}#{function}({source} -> {destination})"


def function_name(function: object) -> str:
    """Return a function's name in profiles.

    Operators and scripted functions have their own names.
    """
    if isinstance(function, str):
        return function
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return find_builtin(function) or name_of(function)


class Span:
    """Span of one call.

    Args:
        key: name of the call.
        peer: id and name of the callee.
        trace: what the callee is asked to record, if anything.
        on_end: called when the call has ended; later reports are ignored.
    """

    def __init__(
        self, key: str, peer: tuple[int, str], trace: TraceContext | None, on_end: Callable[[TraceContext], None]
    ) -> None:
        self.key = key
        self.peer = peer
        self.trace = trace
        self.start: int = time.time_ns()
        self._on_end = on_end
        self._ended = threading.Lock()

    def arrived(self, received: int, replied: int, events: list[Event]) -> None:
        """Add the callee's report, with times by its clock."""
        now = time.time_ns()
        offset = clock_offset(self.start, received, replied, now)
        seen = [event.seen_by_caller(self.key, offset) for event in events]
        self._take(received - offset, replied - offset, seen)

    def end(self) -> None:
        """End the span. A second call does nothing."""
        if self._ended.acquire(blocking=False):
            if self.trace is not None:
                self._on_end(self.trace)
            self._end()

    def _take(self, received: int, replied: int, events: list[Event]) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class RecordedSpan(Span):
    """Span of a call made for a request that is being recorded.

    It is recorded here instead of in torch's profiler, which ends with the calling function; the call may end later.
    """

    def __init__(self, recording: Recording, *about: Any) -> None:
        super().__init__(*about)
        self._recording = recording

    def _take(self, received: int, replied: int, events: list[Event]) -> None:
        self._recording.events += events

    def _end(self) -> None:
        self._recording.events.append(
            Event(self.key, self._recording.node, 0, self.start, time.time_ns(), is_async=True)
        )


class SessionSpan(Span):
    """Span of a call under one of torch's profilers, as a separate record.

    Args:
        session: the run of the profiler.
        is_sync: whether the calling thread waits for the call, and ends the span before later work.
        about: as for `Span`.
    """

    def __init__(self, session: "Session", is_sync: bool, *about: Any) -> None:
        super().__init__(*about)
        self._session = session
        self.thread: int = threading.get_native_id()
        if session.legacy:
            with record_function(SEPARATOR):
                pass
        self.start: int = time.time_ns()
        self._record = record_function(self.key)
        self._record.__enter__()
        self.opened: int = time.time_ns()
        self._done: torch.futures.Future[None] | None = None
        if not is_sync:
            self._done = torch.futures.Future()
            self._record._call_end_callbacks_on_future(self._done)
            session.began(self)

    def _take(self, received: int, replied: int, events: list[Event]) -> None:
        self._session.took(self, received, replied, events)

    def _end(self) -> None:
        if self._done is None:
            self._record.__exit__(None, None, None)
        else:
            self._session.end_record(self)
        self._session.ended(self)

    def end_record(self) -> None:
        """End the record of a call that any thread may end, once, while the profiler runs."""
        if self._done is not None:
            self._done.set_result(None)  # in the profiler's state
