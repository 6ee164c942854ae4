"""Which parts of a worker hear of a lost, replaced or returned worker."""

from types import SimpleNamespace
from unittest.mock import MagicMock, call

from telegrad.worker.member_changes import MemberChanges


def worker_with_peer(incarnation: int) -> tuple[MemberChanges, MagicMock]:
    """Return the part of a worker that handles changes, and a record of its calls."""
    parts = MagicMock()
    parts.members.get.return_value = SimpleNamespace(id=1, incarnation=incarnation)
    changes = MemberChanges()
    for name in ("engine", "members", "membership", "references", "remembered_runs", "autograd", "shutdown"):
        setattr(changes, name, getattr(parts, name))
    return changes, parts


def test_the_end_of_an_older_process_ends_its_references_only() -> None:
    changes, parts = worker_with_peer(incarnation=8)
    changes.on_peer_lost(1, 7, "replaced", departed=False)
    assert parts.references.mock_calls == [call.peer_lost(1, "replaced", False)]
    assert parts.autograd.mock_calls == [call.peer_lost(1, "replaced")]
    assert not parts.shutdown.mock_calls
    assert not parts.membership.mock_calls


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
