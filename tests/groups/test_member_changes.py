"""Parts of a worker that hear of a lost, replaced or returned worker."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from telegrad.group.records import Member
from telegrad.options import Options
from telegrad.types import WorkerInfo
from telegrad.worker.membership.changes import MemberChanges
from telegrad.worker.membership.members import Members


def worker_with_peer(incarnation: int) -> tuple[MemberChanges, MagicMock]:
    """Return the part of a worker that handles changes, and a record of its calls."""
    parts = MagicMock()
    parts.members.get.return_value = SimpleNamespace(id=1, incarnation=incarnation)
    changes = MemberChanges()
    changes.info, changes.host, changes.options = WorkerInfo("w0", 0), "here", Options(transports=("shm",))
    for name in ("engine", "members", "membership", "references", "remembered_runs", "autograd", "shutdown"):
        setattr(changes, name, getattr(parts, name))
    return changes, parts


@pytest.mark.parametrize("departed", [False, True])
def test_the_end_of_an_older_process_ends_its_references_only(departed: bool) -> None:
    """The membership thread adds its successor before the loss is recorded."""
    changes, parts = worker_with_peer(incarnation=7)
    members = changes.members = Members(changes.info, lambda: None)
    members.add(Member(1, "w1", 7, [], "here"))
    mark_lost = members.mark_lost

    def mark_lost_late(*loss: Any) -> bool:
        changes.add_member(Member(1, "w1", 8, [], "here"))
        parts.reset_mock()
        return mark_lost(*loss)

    members.mark_lost = mark_lost_late  # type: ignore[method-assign]
    changes.on_peer_lost(1, 7, "replaced", departed)
    assert parts.references.mock_calls == [call.peer_lost(1, "replaced", False)]
    assert parts.autograd.mock_calls == [call.peer_lost(1, "replaced")]
    assert not parts.shutdown.mock_calls
    assert not parts.membership.mock_calls
    assert not members.lost
    assert not members.departed
    assert not members.removed


def test_a_returned_worker_gets_messages_in_another_epoch() -> None:
    changes, parts = worker_with_peer(incarnation=7)
    changes.on_peer_back(1)
    assert parts.mock_calls.index(call.references.peer_joined(1)) < parts.mock_calls.index(call.autograd.peer_joined(1))
    assert parts.references.mock_calls == [call.peer_joined(1)]
    assert parts.shutdown.mock_calls == [call.peer_back(1)]


def test_the_connection_to_a_successor_stays_when_its_predecessor_is_lost() -> None:
    changes, parts = worker_with_peer(incarnation=8)
    changes.static = True
    parts.members.connected, parts.members.lost = {1: 8}, {1: "replaced"}
    changes.lose_member(1, 7, "killed")
    changes.lose_member(1, 8, "killed")
    assert parts.engine.mock_calls == [call.remove_peer(1, "killed", 7), call.remove_peer(1, "killed", 8)]


def test_what_waited_for_a_lost_worker_is_released() -> None:
    changes, parts = worker_with_peer(incarnation=7)
    changes.static = True
    parts.members.connected, parts.members.lost = {}, {1: "its session has ended before"}
    changes.lose_member(1, 7, "killed")
    assert parts.references.mock_calls == [call.peer_lost(1, "killed", True)]
    assert len(parts.autograd.mock_calls) == 1
    assert not parts.shutdown.mock_calls, "it has heard of the loss"


def test_a_successor_keeps_its_references_when_its_predecessor_is_lost() -> None:
    changes, parts = worker_with_peer(incarnation=8)
    changes.static = True
    parts.members.connected, parts.members.lost = {1: 8}, {}
    changes.lose_member(1, 7, "killed")
    assert not parts.references.mock_calls
    assert not parts.autograd.mock_calls
    parts.members.mark_lost.assert_not_called()


def add_member(changes: MemberChanges, parts: MagicMock, incarnation: int, returned: bool, lost: bool) -> None:
    parts.members.add.return_value = returned
    parts.members.lost = {1: "its session has ended"} if lost else {}
    changes.add_member(SimpleNamespace(id=1, name="w1", incarnation=incarnation, host="here", addresses=["shm:@w1"]))  # type: ignore[arg-type]


def test_another_process_gets_messages_in_another_epoch() -> None:
    """Messages for its predecessor, whose loss this worker may not know of, do not."""
    changes, parts = worker_with_peer(incarnation=7)
    add_member(changes, parts, incarnation=8, returned=True, lost=False)
    assert parts.references.mock_calls == [call.peer_joined(1)]
    assert parts.autograd.mock_calls == [call.peer_joined(1)]
    assert parts.engine.mock_calls == [call.set_peer(1, "w1", 8, ["shm:@w1"])]


def test_the_runs_of_a_predecessor_are_forgotten() -> None:
    changes, parts = worker_with_peer(incarnation=7)
    add_member(changes, parts, incarnation=8, returned=True, lost=False)
    assert parts.remembered_runs.mock_calls == [call.forget_caller(7)]


def test_the_shutdown_waits_for_another_process() -> None:
    changes, parts = worker_with_peer(incarnation=7)
    add_member(changes, parts, incarnation=8, returned=True, lost=False)
    assert parts.shutdown.mock_calls == [call.peer_back(1)]


def test_a_lost_worker_may_connect_again_with_its_next_entry() -> None:
    changes, parts = worker_with_peer(incarnation=7)
    add_member(changes, parts, incarnation=7, returned=False, lost=True)
    assert parts.references.mock_calls == parts.autograd.mock_calls == [call.peer_joined(1)]
    assert not parts.shutdown.mock_calls, "the group has heard of the loss"


def test_a_known_process_keeps_its_references() -> None:
    changes, parts = worker_with_peer(incarnation=7)
    add_member(changes, parts, incarnation=7, returned=False, lost=False)
    assert parts.references.mock_calls == parts.autograd.mock_calls == parts.remembered_runs.mock_calls == []


def test_messages_to_a_worker_that_was_lost_before_are_not_sent() -> None:
    for lost, departed in ((False, False), (True, False), (False, True)):
        changes, parts = worker_with_peer(incarnation=7)
        parts.members.lost, parts.shutdown.is_leaving = {1: "its lease has expired"} if lost else {}, False
        changes.on_peer_lost(1, 7, "reset", departed)
        assert parts.references.mock_calls == [call.peer_lost(1, "reset", lost or departed)]
