"""Profiles of all requests of a process."""

import itertools
import time
from typing import TYPE_CHECKING, Any, Self

from telegrad.observe.events import Event
from telegrad.observe.profiler import profiler
from telegrad.observe.recording import Option
from telegrad.observe.torch_profiler import EventList, Legacy

__all__ = ["ServerProfile"]

if TYPE_CHECKING:
    from torch.autograd.profiler_legacy import profile as _Base
else:
    _Base = object if Legacy is None else Legacy


class ServerProfile(_Base):
    """Profiler of every request of this process while it is active, for all callers.

    It covers all threads that run requests, but no code outside of requests. Several may be active at once, nested or
    not.

    Args: as of ``torch.autograd.profiler_legacy.profile``: enabled, use_cuda, record_shapes, with_flops,
        profile_memory, with_stack, with_modules.

    Attributes:
        function_events: all events, an ``EventList``; available after the end.
        process_global_function_events: a list of ``FunctionEvent`` for each request; available after the end.

    Raises:
        RuntimeError: torch no longer has its legacy profiler, which is required; or this is entered twice.

    Example::

        profile = rpc.remote("worker1", observe.ServerProfile)
        profile.rpc_sync().__enter__()
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        profile.rpc_sync().__exit__(None, None, None)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if Legacy is None:
            raise RuntimeError("a server profile needs torch.autograd.profiler_legacy, which this torch lacks.")
        self.entered: bool = False
        self.process_global_function_events: list[list[object]]
        self.function_events: Any
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._requests: list[list[Event]] = []

    @property
    def options(self) -> Option:
        """Return what is recorded of each operator."""
        return Option.of(self)

    def took(self, events: list[Event]) -> None:
        """Add the events of a finished request."""
        self._requests.append(events)

    def __enter__(self) -> Self:
        if self.enabled:
            if self.entered:
                raise RuntimeError("autograd profiler traces are not reentrant")
            self.entered = True
            self._began = time.time_ns()
            profiler.serve(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.enabled:
            return
        profiler.served(self)
        self.process_global_function_events = [self._function_events(events) for events in self._requests]
        self.function_events = EventList(
            itertools.chain.from_iterable(self.process_global_function_events),
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
        )
        self.function_events._build_tree()

    def _function_events(self, events: list[Event]) -> list[object]:
        found = [event.as_function_event(self._began, event.node) for event in events]
        return sorted(found, key=lambda event: (event.time_range.start, -event.time_range.end))
