"""The calls that were made while one of torch's profilers was on."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad.observe.events import Event, combined
from telegrad.observe.recording import Option
from telegrad.observe.spans import SEPARATOR, SessionSpan

__all__ = ["RemoteCall", "Session"]


_SLACK = 10_000_000  # ns by which Kineto's clock may differ from ours


class RemoteCall(NamedTuple):
    """What is known of a call whose callee has reported. Times are in ns since the epoch, by the caller's clock."""

    key: str
    thread: int  # that made it: the system's number
    sent: int
    node: int  # id of the callee
    name: str  # of the callee
    received: int
    replied: int
    events: tuple[Event, ...]


class Session:
    """One of torch's profilers, from its start to its end.

    Args:
        options: what it was asked to note.
        legacy: is it torch's legacy profiler, and not Kineto?
        before: ns since the epoch when it had not started yet; the session is made when it has.
    """

    def __init__(self, options: Option, legacy: bool, before: int) -> None:
        self.options = options
        self.legacy = legacy
        self.thread: int = threading.get_ident()
        self.process: int = os.getpid()
        self.node: int = -1  # the id of the worker that made its calls
        self.names: dict[int, str] = {}  # of workers that did something, by id
        self._name_of: Callable[[int], str] = str
        self.calls: list[RemoteCall] = []
        self.spans: list[SessionSpan] = []  # those that have ended
        self.more: list[Event] = []  # for no single call: of backward passes, and of threads that torch does not see
        self.closed: bool = False
        self._started = before, time.time_ns()

    def called_by(self, node: int, name_of: Callable[[int], str]) -> None:
        """Which worker makes its calls."""
        self.node = node
        self._name_of = name_of

    def close(self) -> None:
        """The profiler has ended. It may live long; its worker need not."""
        self.closed = True
        self._name_of = str

    def took(self, span: SessionSpan, received: int, replied: int, events: list[Event]) -> None:
        """A callee's report has come. One that comes after the end is too late."""
        if not self.closed:
            node, name = span.peer
            self.names[node] = name
            self._name(events)
            self.calls.append(
                RemoteCall(span.key, span.thread, span.start, node, name, received, replied, tuple(events))
            )

    def add(self, events: list[Event]) -> None:
        """Of this process and others, for no single call."""
        if not self.closed:
            self._name(events)
            self.more += events

    def _name(self, events: list[Event]) -> None:
        for event in events:
            if event.node not in self.names:
                self.names[event.node] = self._name_of(event.node)

    def ended(self, span: SessionSpan) -> None:
        """So has a call."""
        if not self.closed:
            self.spans.append(span)

    def completed(self, events: Any) -> Any:
        """The legacy profiler's events, with those of other workers."""
        self._name_node(events)
        for event in [event for event in events if event.name == SEPARATOR]:
            events.remove(event)
            if event.cpu_parent is not None:
                event.cpu_parent.cpu_children.remove(event)
        others = self.others()
        return combined(events, others, self.node, self._base(events)) if others else events

    def extended(self, events: list[Any], start: int) -> list[Any]:
        """As `completed`, of Kineto's events, which torch has yet to order. `start` is about when it began to count."""
        self._name_node(events)
        self._started = start - _SLACK, start + _SLACK
        base = self._base(events)
        events += [event.as_function_event(base, self.node) for event in self.others()]
        events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        return events

    def others(self) -> list[Event]:
        """What torch's profiler has not seen."""
        return [*self.more, *(event for call in self.calls for event in call.events)]

    def _name_node(self, events: list[Any]) -> None:
        """Says of this process's events which worker they are of, as torch does."""
        for event in events:
            if event.node_id == -1:
                event.node_id = self.node

    def _base(self, events: list[Any]) -> int:
        """The moment, in ns since the epoch, from which torch counts its times. Torch does not tell, but each call
        began between two readings of the clock here; so no call seems to begin after what it made its callee do."""
        low, high = self._started
        found: dict[str, list[Any]] = defaultdict(list)
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
