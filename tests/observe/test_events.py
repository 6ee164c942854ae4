"""Events of other workers in torch's lists: their worker and their times."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

from telegrad.observe.events import Event, clock_offset
from telegrad.observe.recording import Option
from telegrad.observe.sessions import Session

MS = 1_000_000  # ns


@pytest.mark.parametrize("ahead", [0, 5, -5, 1_000_000, -1_000_000])
def test_clock_offsets_are_estimated_from_messages(ahead: int) -> None:
    """The request takes 10, and the reply 20."""
    offset = clock_offset(1000, 1010 + ahead, 1050 + ahead, 1070)
    assert 1000 <= 1010 + ahead - offset <= 1050 + ahead - offset <= 1070
    if abs(ahead) > 20:
        assert abs(offset - ahead) <= 10
    else:
        assert offset == 0  # it may be one clock


def test_an_event_survives_the_wire_and_keeps_its_times() -> None:
    with profiler_legacy.profile(record_shapes=True, with_stack=True) as prof:
        torch.cat([torch.ones(2, 3), torch.ones(1, 3)])
    (cat,) = [event for event in prof.function_events if event.name == "aten::cat"]
    event = Event.of(cat, 7, 1_000_000_000)
    again = Event(*tuple(event)).seen_by_caller("call", MS).as_function_event(1_000_000_000)
    assert again.name == "call#remote_op: aten::cat"
    assert again.time_range.start == pytest.approx(cat.time_range.start - 1000, abs=0.01)
    assert again.time_range.elapsed_us() == pytest.approx(cat.time_range.elapsed_us(), abs=0.01)
    assert (again.node_id, again.is_remote, again.input_shapes) == (7, True, cat.input_shapes)


def session_with_a_call(*events: Event) -> tuple[Session, Any]:
    """Return a session and torch's event of a call.

    The session's start, at 0, was recorded 2 s late; the event is half a second after it.
    """
    session = Session(Option(0), True, 0)
    session._started = (0, 2000 * MS)
    span: Any = SimpleNamespace(key="call", start=499 * MS, opened=501 * MS, peer=(1, "w1"), thread=1)
    session.took(span, 600 * MS, 700 * MS, list(events))
    session.ended(span)
    local = EventList([FunctionEvent(id=1, name="call", thread=1, start_us=500_000, end_us=800_000)])
    local._build_tree()
    return session, local


def test_remote_events_are_within_their_call() -> None:
    session, local = session_with_a_call(Event("call#remote_op: op", 1, 1, 600 * MS, 700 * MS))
    call, remote = session.completed(local)
    assert (call.name, remote.name) == ("call", "call#remote_op: op")
    assert remote.time_range.start == pytest.approx(600_000, abs=1000)


def test_threads_of_two_workers_are_distinct() -> None:
    """Threads of different workers have equal numbers; torch builds trees by thread."""
    session, local = session_with_a_call(
        Event("outer", 1, 1, 600 * MS, 700 * MS),
        Event("other worker's", 2, 1, 610 * MS, 690 * MS),
        Event("inner", 1, 1, 620 * MS, 680 * MS),
    )
    found = {event.name: event for event in session.completed(local)}
    assert [child.name for child in found["outer"].cpu_children] == ["inner"]
    assert found["other worker's"].cpu_parent is None


def test_a_report_after_the_end_is_dropped() -> None:
    session, local = session_with_a_call()
    session.close()
    late: Any = SimpleNamespace(key="late", start=0, peer=(1, "w1"), thread=1)
    session.took(late, 0, 1, [Event("late", 1, 1, 0, 1)])
    assert [event.name for event in session.completed(local)] == ["call"]
