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


def test_a_returned_worker_may_get_messages_about_references() -> None:
    changes, parts = worker_with_peer(incarnation=7)
    changes.on_peer_back(1)
    assert parts.references.mock_calls == [call.peer_joined(1)]
    assert parts.shutdown.mock_calls == [call.peer_back(1)]


def test_the_connection_to_a_successor_stays_when_its_predecessor_is_lost() -> None:
    changes, parts = worker_with_peer(incarnation=8)
    changes.static = True
    parts.members.connected, parts.members.lost = {1: 8}, {1: "replaced"}
    changes.lose_member(1, 7, "killed")
    assert not parts.engine.mock_calls
    changes.lose_member(1, 8, "killed")
    assert parts.engine.mock_calls == [call.remove_peer(1, "killed")]
