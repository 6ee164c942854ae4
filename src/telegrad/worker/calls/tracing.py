"""Where a profiler looks into calls.

Worker code knows no profiler. `telegrad.observe` puts one here, and makes it an interceptor of calls
(telegrad.worker.calls.interceptors) while a profile is recorded. Otherwise it costs a call nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from telegrad.worker.calls.client import Calls

__all__ = ["Observer", "Recording", "Report", "Span", "TraceContext", "bind_recording", "recording"]

T = TypeVar("T")

TraceContext = tuple[int, int]  # what a request says: number of its span, options
Report = tuple[Any, ...]  # what its reply says: plain values


class Span(Protocol):
    """The time that a call takes, in somebody's profile."""

    asked: TraceContext | None  # for the request, where the callee is to record what it does

    def end(self) -> None:
        """The call is over. Called again, it does nothing."""


class Recording(Protocol):
    """What is recorded of a request on its callee. Whatever runs inside it belongs to it; any thread may enter it."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    options: Any  # an int: what to note

    def report(self) -> Report | None:
        """Ends it; what the caller has asked for."""

    def drain(self) -> list[Any]:
        """What has been recorded so far, as plain values, which it forgets; it goes on."""

    def join(self, name: str, began: int, events: list[Any]) -> None:
        """Adds what others have drained of theirs, done for something that began at that time (ns since the epoch)."""

    def end_side_recording(self) -> None:
        """Ends it, if it was made by `Observer.side_thread_recording`."""


class Observer(Protocol):
    """What `telegrad.observe` offers to the call path."""

    on: bool  # does anybody profile calls in this process?
    serving: bool  # are all requests to be recorded that this process answers?

    def begin(self, calls: "Calls", peer: int, mode: str, function: Any) -> Span | None:
        """A call begins; None where the calling thread is not being profiled.

        Args:
            calls: whose it is.
            peer: whom it goes to.
            mode: sync, async, remote or to_here; type for the type of a value.
            function: what is called, or its name.
        """

    def range(self, name: str) -> AbstractContextManager[Any]:
        """A part of what this thread does, where it is being profiled."""

    def side_thread_recording(self, calls: "Calls") -> Recording | None:
        """For other threads that do something for this one, where it is being profiled; to be reported at the end."""

    def record(self, node: int, asked: TraceContext | None) -> Recording:
        """A request is about to run on the worker with this id."""

    def arrived(self, report: Report) -> None:
        """A reply has brought this."""


class _NullObserver:
    """What stands in its place until `telegrad.observe` is imported."""

    on = False
    serving = False

    def begin(self, *_: Any) -> None:
        return None

    def arrived(self, _: Any) -> None:
        return None


observer: Any = (
    _NullObserver()
)  # an Observer; asked for more than `on` and `serving` only where these, or a message, say so
recording: ContextVar[Recording | None] = ContextVar("telegrad_recording", default=None)


def bind_recording(inner: Recording, callback: Callable[[Any], T]) -> Callable[[Any], T]:
    """The callback, as part of the request that a recording is of."""

    def run(done: Any) -> T:
        with inner:
            return callback(done)

    return run
