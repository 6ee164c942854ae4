"""Calls made while one of torch's profilers was active."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from torch.autograd.profiler_util import EventList, FunctionEvent

from telegrad.observe.events import Event, combined
from telegrad.observe.recording import Option
from telegrad.observe.spans import SEPARATOR, SessionSpan

__all__ = ["RemoteCall", "Session"]


_SLACK = 10_000_000  # ns by which Kineto's clock may differ from time.time_ns


class RemoteCall(NamedTuple):
    """Call with its callee's report. Times are ns since epoch by the caller's clock.

    Example::

        with torch.profiler.profile() as prof:
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        for each in observe.remote_calls(prof):
            print(each.key, (each.replied - each.received) / 1e3, "us on", each.name)
    """

    key: str
    thread: int  # native id of the calling thread
    sent: int
    node: int  # id of the callee
    name: str  # of the callee
    received: int
    replied: int
    events: tuple[Event, ...]


class Session:
    """Run of one of torch's profilers, from start to end.

    Args:
        options: what it records of each operator.
        legacy: whether it is torch's legacy profiler, not Kineto.
        before: time before its start, in ns since the epoch. The session is created after the start.
    """

    def __init__(self, options: Option, legacy: bool, before: int) -> None:
        self.options = options
        self.legacy = legacy
        self.thread: int = threading.get_ident()
        self.process: int = os.getpid()
        self.node: int = -1  # id of the worker that made its calls
        self.names: dict[int, str] = {}  # names of workers with events, by id
        self._name_of: Callable[[int], str] = str
        self.calls: list[RemoteCall] = []
        self.spans: list[SessionSpan] = []  # spans that have ended
        self.more: list[Event] = []  # events of no single call: backward passes and unprofiled threads
        self.closed: bool = False
        self._open: set[SessionSpan] = set()  # spans that another thread may end
        self._open_lock = threading.Lock()
        self._started = before, time.time_ns()

    def called_by(self, node: int, name_of: Callable[[int], str]) -> None:
        """Set the worker that makes its calls."""
        self.node = node
        self._name_of = name_of

    def close(self) -> None:
        """Mark the profiler as ended.

        It may outlive its worker, so it releases the worker. The records of calls that are under way end now: torch
        would write the end of a later one to memory that it has freed.
        """
        with self._open_lock:
            self.closed = True
            for span in self._open:
                span.end_record()
            self._open.clear()
        self._name_of = str

    def began(self, span: SessionSpan) -> None:
        """Add a call that any thread may end."""
        with self._open_lock:
            self._open.add(span)

    def end_record(self, span: SessionSpan) -> None:
        """End the record of a call, unless the profiler has ended."""
        with self._open_lock:
            if span in self._open:
                self._open.remove(span)
                span.end_record()

    def took(self, span: SessionSpan, received: int, replied: int, events: list[Event]) -> None:
        """Add a callee's report, unless the profiler has ended."""
        if not self.closed:
            node, name = span.peer
            self.names[node] = name
            self._name(events)
            self.calls.append(
                RemoteCall(span.key, span.thread, span.start, node, name, received, replied, tuple(events))
            )

    def add(self, events: list[Event]) -> None:
        """Add events of no single call, of this process and others."""
        if not self.closed:
            self._name(events)
            self.more += events

    def _name(self, events: list[Event]) -> None:
        for event in events:
            if event.node not in self.names:
                self.names[event.node] = self._name_of(event.node)

    def ended(self, span: SessionSpan) -> None:
        """Add a call that has ended."""
        if not self.closed:
            self.spans.append(span)

    def completed(self, events: EventList) -> EventList:
        """Return the legacy profiler's events together with those of other workers."""
        self._name_node(events)
        for event in [event for event in events if event.name == SEPARATOR]:
            events.remove(event)
            if event.cpu_parent is not None:
                event.cpu_parent.cpu_children.remove(event)
        others = self.others()
        return combined(events, others, self.node, self._base(events)) if others else events

    def extended(self, events: list[FunctionEvent], start: int) -> list[FunctionEvent]:
        """Return Kineto's events, still unordered, with those of other workers.

        `start` is the approximate time at which Kineto began to count.
        """
        self._name_node(events)
        self._started = start - _SLACK, start + _SLACK
        base = self._base(events)
        events += [event.as_function_event(base, self.node) for event in self.others()]
        events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        return events

    def others(self) -> list[Event]:
        """Return the events that torch's profiler did not record."""
        return [*self.more, *(event for call in self.calls for event in call.events)]

    def _name_node(self, events: list[FunctionEvent]) -> None:
        """Set the worker's id on this process's events, as torch does."""
        for event in events:
            if event.node_id == -1:
                event.node_id = self.node

    def _base(self, events: list[FunctionEvent]) -> int:
        """Return the start of torch's times, in ns since the epoch.

        Torch does not report it. But each call began between two readings of the clock in this process, and these bound
        the start. With the result no call seems to begin after the events of its callee.
        """
        low, high = self._started
        found: dict[str, list[FunctionEvent]] = defaultdict(list)
        for event in sorted(events, key=lambda event: event.time_range.start):
            found[event.name].append(event)
        spans: dict[str, list[SessionSpan]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: span.start):
            spans[span.key].append(span)
        for key, ours in spans.items():
            if len(found[key]) == len(ours):
                for span, event in zip(ours, found[key], strict=True):
                    start = int(event.time_range.start * 1000)
                    low, high = max(low, span.start - start), min(high, span.opened - start)
        return (low + high) // 2
