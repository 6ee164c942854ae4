"""Profiler of the process; the call path asks it whether to record.

There is one for the process, as torch's profilers are.
"""

import itertools
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Protocol

import torch

from telegrad.observe import torch_profiler
from telegrad.observe.events import Event
from telegrad.observe.recording import Option, Recording
from telegrad.observe.sessions import Session
from telegrad.observe.spans import RecordedSpan, SessionSpan, Span, call_key, function_name
from telegrad.worker import live_workers
from telegrad.worker.calls import tracing
from telegrad.worker.calls.client import Calls
from telegrad.worker.calls.interception import CallForm, ResolvedCall, Sender
from telegrad.worker.calls.interceptors import InterceptedCall, Proceed, of_process, shown_function
from telegrad.worker.calls.tracing import Report, TraceContext

__all__ = ["Profiler", "profiler"]


class RequestProfile(Protocol):
    """Profile of all requests of this process (`server.py`)."""

    @property
    def options(self) -> Option:
        """Options of the recording of each operator."""

    def took(self, events: list[Event]) -> None:
        """Add the events of a request."""


class _Key(threading.local):
    """Name that this thread has chosen for its next call."""

    chosen: str | None = None


class Profiler:
    """Implementation of `telegrad.worker.calls.tracing.Observer`."""

    def __init__(self) -> None:
        self.on: bool = False
        self.serving: bool = False
        self._lock = threading.Lock()
        self._active = 0  # sessions, servers' profiles, and threads in recordings
        self._sessions: list[Session] = []
        # Profiles of all requests of this process. Weak: a caller that enters one by RPC may be lost before its end.
        self._servers: tuple[weakref.ref[RequestProfile], ...] = ()
        self._numbers = itertools.count(1)
        self._spans: dict[int, Span] = {}  # of pending calls, by number
        self._key = _Key()
        self._interceptor = self.intercept  # one object, by which it is removed

    # ---- the caller's side

    def intercept(self, call: InterceptedCall, proceed: Proceed, /) -> object:
        """Show a call in the profile of the calling thread, if there is one."""
        assert isinstance(call, ResolvedCall)
        if self._servers:
            self._open_servers()  # the last may have been dropped: then no further call comes here
        span = self._begin(call.calls, call.form) if call.form is not None and call.form.mode else None
        if span is None:
            return proceed(call)
        is_sync = call.form is not None and call.form.mode == "sync"
        try:
            future = proceed(replace(call, trace=span.trace))
            if is_sync:  # a record of torch ends in the thread where it began
                with suppress(Exception):
                    future.wait()  # the caller gets the error from the future
        except BaseException:
            span.end()
            raise
        if is_sync:
            span.end()
        else:
            torch._C.Future.add_done_callback(future, lambda _: span.end())
        return future

    def _begin(self, calls: Sender, form: CallForm) -> Span | None:
        """Begin the span of a call; None if the calling thread is not profiled."""
        mode, function, peer = form.mode, form.function, form.peer
        if form.receiver is not None and (function is None or function is type):
            mode = "to_here" if function is None else "type"
        recording = tracing.recording.get()
        session = self._session(recording is None) if torch_profiler.profiler_enabled() else None
        if session is None and not isinstance(recording, Recording):
            return None
        to = calls.name_of(peer)
        trace: TraceContext | None = None
        if mode == "type":
            mode, function = "async", "_rref_typeof_on_owner"
        elif mode != "to_here":  # a fetch runs no function
            options = session.options if session is not None else recording.options  # type: ignore[union-attr]
            trace = (next(self._numbers), int(options))
        key, self._key.chosen = self._key.chosen, None
        if key is None:
            shown = function_name(shown_function(function, form.args))
            key = call_key(mode, shown, calls.name_of(calls.worker_id), to)
        span: Span
        if session is not None:
            session.called_by(calls.worker_id, calls.name_of)
            span = SessionSpan(session, form.mode == "sync", key, (peer, to), trace, self._on_span_end)
        else:
            assert isinstance(recording, Recording)
            span = RecordedSpan(recording, key, (peer, to), trace, self._on_span_end)
        if trace is not None:
            self._spans[trace[0]] = span
        return span

    def arrived(self, report: Report) -> None:
        number, received, replied, events = report
        span = self._spans.get(number)
        if span is not None:
            span.arrived(received, replied, [Event._make(event) for event in events])

    def _on_span_end(self, trace: TraceContext) -> None:
        self._spans.pop(trace[0], None)

    def range(self, name: str) -> AbstractContextManager[object]:
        """Label a section of this thread's work if it is being profiled."""
        return torch_profiler.record_function(name) if torch_profiler.profiler_enabled() else nullcontext()

    def side_thread_recording(self, calls: Calls) -> Recording | None:
        """Return a recording of other threads' work for this one, if it is profiled.

        When the recording is reported, its events join the profile.
        """
        inner = tracing.recording.get()
        session = self._session(False) if torch_profiler.profiler_enabled() else None
        if session is None:
            return inner if isinstance(inner, Recording) else None
        session.called_by(calls.worker_id, calls.name_of)
        return Recording(self, session.node, None, session.options, session)

    def name_next_call(self, key: str) -> None:
        """Set the profile's name for the next profiled call of this thread.

        Example::

            with torch.profiler.profile() as prof:
                observe.name_next_call("warm-up")
                rpc.rpc_sync("worker1", torch.seed)
        """
        self._key.chosen = key

    # ---- the callee's side

    def record(self, node: int, trace: TraceContext | None) -> Recording:
        options = Option(trace[1]) if trace is not None else Option(0)
        for server in self._open_servers():
            options |= server.options
        return Recording(self, node, trace, options)

    def recorded(self, recording: Recording) -> None:
        """Handle the end of a recording."""
        if recording.session is not None:
            recording.session.add(recording.events)
            return
        self.served_by(recording.events)

    def served_by(self, events: list[Event]) -> None:
        """Add the events of a request, or of a part of a backward pass, to all servers."""
        for server in self._open_servers():
            server.took(events)

    # ---- active profilers

    def open(self, session: Session) -> None:
        """Register a profiler that the program has started in this thread."""
        with self._lock:
            self._sessions.append(session)
        self.count(1)

    def close(self, session: Session) -> None:
        """Remove a profiler that has ended."""
        with self._lock:
            if session.closed:
                return
            session.close()
            self._sessions.remove(session)
        self.count(-1)

    def _session(self, or_latest: bool) -> Session | None:
        """Return the session for which this thread is being profiled.

        By default it is the thread's own. With `or_latest` it may be the latest of the process: torch copies a profiler
        to the threads of the autograd engine.
        """
        me = threading.get_ident()
        sessions = self._sessions
        for session in reversed(sessions):
            if session.thread == me:
                return session
        return sessions[-1] if or_latest and sessions else None

    def serve(self, server: RequestProfile) -> None:
        """Record all requests of this process from now on, for a server's profile."""
        with self._lock:
            self._servers = (*self._servers, weakref.ref(server))
            self.serving = True
        self.count(1)
        self._admit()

    def served(self, server: RequestProfile) -> None:
        """Stop recording for a server's profile."""
        self._remove_server(server)

    def _open_servers(self) -> list[RequestProfile]:
        """Return the servers' profiles, without those dropped before their end."""
        found = [server() for server in self._servers]
        if any(server is None for server in found):
            self._remove_server(None)
        return [server for server in found if server is not None]

    def _remove_server(self, ended: RequestProfile | None) -> None:
        """Remove a server's profile that has ended, and those that have been dropped."""
        with self._lock:
            kept = tuple(each for each in self._servers if each() is not None and each() is not ended)
            removed = len(self._servers) - len(kept)
            self._servers, self.serving = kept, bool(kept)
        if removed:
            self.count(-removed)
            self._admit()

    @staticmethod
    def _admit() -> None:
        for worker in live_workers():
            worker.handlers.update_recording()

    def count(self, change: int) -> None:
        """Add to the number of active profiles; calls are intercepted while there are any."""
        with self._lock:
            self._active += change
            is_on = self._active > 0
            if is_on and not self.on:
                of_process.add(self._interceptor)
            elif self.on and not is_on:
                of_process.remove(self._interceptor)
            self.on = is_on


profiler: Profiler = Profiler()
tracing.observer = profiler
