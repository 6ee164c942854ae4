"""Profile events in a serializable form; torch's own cannot leave their process."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from telegrad.observe.torch_profiler import EventList, FunctionEvent

__all__ = ["REMOTE_OP", "Event", "clock_offset", "combined"]

REMOTE_OP = "#remote_op: "  # between the names of a call and of an event of its callee; as in torch
_THREADS_OF_A_NODE = 1_000_000


class Event(NamedTuple):
    """Event of one operator or one call."""

    name: str
    node: int  # id of the worker on which it ran
    thread: int
    start: int  # ns since the epoch
    end: int
    is_async: bool = False
    scope: int = 0  # an at::RecordScope
    shapes: Sequence[object] | None = None  # of its tensors, if recorded
    stack: Sequence[str] | None = None
    cpu_memory: int = 0  # bytes
    device_memory: int = 0
    flops: int = 0
    kernels: Sequence[tuple[str, int, float]] = ()  # (name, device, duration in us)

    @classmethod
    def of(cls, event: Any, node: int, base: int) -> "Event":
        """Convert torch's event.

        `base` is the start, in ns since the epoch, from which torch counts its times.
        """
        return cls(
            event.name,
            node,
            event.thread,
            base + int(event.time_range.start * 1000),
            base + int(event.time_range.end * 1000),
            event.is_async,
            event.scope,
            _lists(event.input_shapes),
            list(event.stack or ()),
            event.cpu_memory_usage,
            event.device_memory_usage,
            event.flops or 0,
            [tuple(kernel) for kernel in event.kernels],
        )

    def seen_by_caller(self, call: str, offset: int) -> "Event":
        """Return the event as one of a call's callee, by the caller's clock."""
        return self._replace(name=f"{call}{REMOTE_OP}{self.name}", start=self.start - offset, end=self.end - offset)

    def as_function_event(self, base: int, here: int | None = None) -> Any:
        """Return torch's form of the event, with times counted from `base`.

        The event is remote unless it is of the worker `here` and of no call.
        """
        remote = self.node != here or REMOTE_OP in self.name
        event = FunctionEvent(
            id=0,
            node_id=self.node,
            name=self.name,
            trace_name=self.name,
            # Threads of different workers have the same small numbers, and torch identifies events by them.
            thread=self.thread + (self.node + 1) * _THREADS_OF_A_NODE if remote else self.thread,
            start_us=(self.start - base) / 1000,
            end_us=(self.end - base) / 1000,
            input_shapes=self.shapes,
            stack=self.stack,
            scope=0,  # a remote backward pass has no forward operators in this process
            cpu_memory_usage=self.cpu_memory,
            device_memory_usage=self.device_memory,
            is_async=self.is_async,
            is_remote=remote,
            is_legacy=True,
            flops=self.flops,
        )
        for name, device, duration in self.kernels:
            event.append_kernel(name, device, duration)
        return event


def _lists(shapes: Sequence[object] | None) -> list[object]:
    return [_lists(shape) if isinstance(shape, (list, tuple)) else shape for shape in shapes or ()]


def clock_offset(sent: int, received: int, replied: int, returned: int) -> int:
    """Return by how many ns the callee's clock is ahead of the caller's.

    The clocks count as one (0) if their times are possible, that is, no message arrives before it was sent. Otherwise
    both directions are assumed to take the same time, as in NTP.

    Args:
        sent, returned: by the caller's clock.
        received, replied: by the callee's clock.
    """
    if sent <= received <= replied <= returned:
        return 0
    return ((received - sent) + (replied - returned)) // 2


def combined(local: Any, others: Iterable[Event], node: int, base: int) -> Any:
    """Return all events of a profile, including other workers', in order of start.

    Args:
        local: torch's events, with their tree of parents and children, which is kept.
        others: events to add, with their own tree.
        node: id of this worker.
        base: start of torch's times in ns since the epoch.
    """
    options = {
        "use_device": local._use_device,
        "profile_memory": local._profile_memory,
        "with_flops": local._with_flops,
    }
    added = EventList((event.as_function_event(base, node) for event in others), **options)
    added._build_tree()
    events = sorted([*local, *added], key=lambda event: (event.time_range.start, -event.time_range.end))
    both = EventList(events, **options)
    both._tree_built = True
    return both
