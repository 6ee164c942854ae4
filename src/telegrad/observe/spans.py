"""The calling side: the time that a call takes, and what its callee reports of it."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from telegrad.observe.events import Event, clock_offset
from telegrad.observe.recording import Recording
from telegrad.observe.torchs import record_function
from telegrad.worker.callables import find_builtin, name_of
from telegrad.worker.profiling import Asked

if TYPE_CHECKING:
    from telegrad.observe.sessions import Session

__all__ = ["SEPARATOR", "RecordedSpan", "SessionSpan", "Span", "call_key", "function_name"]

SEPARATOR = "telegrad::call"  # without it, the legacy profiler takes two calls of one name in a row for one
_MODES_IN_ORDER = ("sync", "to_here")  # they end where they began, before anything else there


def call_key(mode: str, function: str, source: str, destination: str) -> str:
    """The name of a call in a profile; torch's own.

    Args:
        mode: sync, async or remote; or to_here, which calls no function.
        function: what is called.
        source, destination: names of workers.
    """
    if mode == "to_here":
        return f"to_here#({source})->({destination})"
    return f"rpc_{mode}#{function}({source} -> {destination})"


def function_name(function: Any) -> str:
    """What a profile calls a function: operators and scripted functions have names of their own."""
    if isinstance(function, str):
        return function
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return find_builtin(function) or name_of(function)


class Span:
    """One call.

    Args:
        key: its name.
        peer: the id and the name of the worker that is called.
        asked: what the callee is asked to record, if anything.
        over: called when the call is; no report is taken any more.
    """

    def __init__(self, key: str, peer: tuple[int, str], asked: Asked | None, over: Callable[[Asked], None]) -> None:
        self.key = key
        self.peer = peer
        self.asked = asked
        self.start: int = time.time_ns()
        self._tell = over
        self._over = threading.Lock()

    def arrived(self, received: int, replied: int, events: list[Event]) -> None:
        """The callee's report is here; times are by its clock."""
        now = time.time_ns()
        offset = clock_offset(self.start, received, replied, now)
        seen = [event.seen_by_caller(self.key, offset) for event in events]
        self._take(received - offset, replied - offset, seen)

    def end(self) -> None:
        """The call is over. Called again, it does nothing."""
        if self._over.acquire(blocking=False):
            if self.asked is not None:
                self._tell(self.asked)
            self._end()

    def _take(self, received: int, replied: int, events: list[Event]) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class RecordedSpan(Span):
    """A call made for a request that is being recorded. It is noted here, and not by torch's profiler, which ends with
    the function that made the call; the call may not."""

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
    """A call made under one of torch's profilers, as a record of its own."""

    def __init__(self, session: "Session", mode: str, *about: Any) -> None:
        super().__init__(*about)
        self._session = session
        self.thread: int = threading.get_native_id()  # the system's number
        if session.legacy:
            with record_function(SEPARATOR):
                pass
        self.start: int = time.time_ns()
        self._record = record_function(self.key)
        self._record.__enter__()
        self.opened: int = time.time_ns()
        self._done: torch.futures.Future[None] | None = None
        if mode not in _MODES_IN_ORDER:
            self._done = torch.futures.Future()
            self._record._call_end_callbacks_on_future(self._done)

    def _take(self, received: int, replied: int, events: list[Event]) -> None:
        self._session.took(self, received, replied, events)

    def _end(self) -> None:
        if self._done is None:
            self._record.__exit__(None, None, None)
        else:
            self._done.set_result(None)  # ends the record in the profiler's state, whichever thread this is
        self._session.ended(self)
