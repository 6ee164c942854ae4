"""Interface of a profiler in the call path.

At the caller, the profiler is an interceptor while a profile is recorded (`telegrad.worker.calls.interceptors`), which
adds a `TraceContext` to the request. `telegrad.observe` also installs an observer here, for the rest:

- The callee records. A server interceptor cannot do this: each thread that works for the request enters the recording,
  such as the event loop at each step of a coroutine, and the report is part of the metadata of the reply, which is made
  after the result has been encoded, when no interceptor runs.
- The reports that arrive with replies, and the ranges of backward passes, which are not calls.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, TypeVar

__all__ = ["Observer", "Recording", "Report", "TraceContext", "bind_recording", "recording"]

T = TypeVar("T")
A = TypeVar("A")

TraceContext = tuple[int, int]  # content of a request: number of its span, options
# Content of a reply: number of the span; times of receipt and reply, ns since the epoch; events.
Report = tuple[int, int, int, Sequence[Iterable[object]]]


class Caller(Protocol):
    """Calls of the worker that is profiled (`telegrad.worker.calls.client.Calls`)."""

    worker_id: int

    def name_of(self, worker_id: int, /) -> str: ...


class Recording(Protocol):
    """Recording of a request on the callee, for code inside it.

    Any thread may enter the recording.
    """

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def options(self) -> int:
        """Details to record."""

    def report(self) -> Report | None:
        """End the recording and return the report that the caller asked for."""

    def drain(self) -> list[object]:
        """Return and forget the events so far, as plain values; the recording continues."""

    def join(self, name: str, began: int, events: list[object]) -> None:
        """Add events drained from other recordings.

        Args:
            name: Name of the work.
            began: Start of the work, ns since the epoch.
            events: Drained events.
        """

    def end_side_recording(self) -> None:
        """End a recording made by `Observer.side_thread_recording`."""


class Observer(Protocol):
    """Profiler interface that `telegrad.observe` implements."""

    on: bool  # calls of this process are profiled
    serving: bool  # all requests to this process are recorded

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a named range of the calling thread's profile."""

    def side_thread_recording(self, calls: Caller) -> Recording | None:
        """Return a recording for other threads that work for the calling thread.

        None if the calling thread is not profiled.
        """

    def record(self, node: int, trace: TraceContext | None) -> Recording:
        """Return the recording of a request that is about to run on a worker.

        Args:
            node: Id of the worker.
            trace: Trace context of the request, if any.
        """

    def arrived(self, report: Report) -> None:
        """Add the report of a reply to the profile."""


class _NullObserver:
    """Observer until `telegrad.observe` is imported."""

    on = False
    serving = False

    def arrived(self, _: object) -> None:
        return None


observer: Any = _NullObserver()  # an Observer; other members are used only if `on`, `serving` or a message require it
recording: ContextVar[Recording | None] = ContextVar("telegrad_recording", default=None)


def bind_recording(inner: Recording, callback: Callable[[A], T]) -> Callable[[A], T]:
    """Return a callback that runs inside a recording."""

    def run(done: A) -> T:
        with inner:
            return callback(done)

    return run
