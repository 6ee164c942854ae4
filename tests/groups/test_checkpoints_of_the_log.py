"""Checkpoints of the group's log, and the entries that are deleted after them."""

import pytest
from membership_helpers import log_of, members_of

from telegrad.group.log import FellBehind
from telegrad.protocols.membership import Leave
from telegrad.rpc import Worker
from telegrad.testing import cluster, eventually


def test_checkpoints_shorten_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.group.log._INTERVAL", 4)
    with cluster(1, dynamic=True) as group:
        for _ in range(5):
            Worker("w1", store=group.store).shutdown(timeout=30)
        read: list[int] = []
        log = log_of(group.store)
        assert log.view.epoch == 11
        store = log.store
        monkeypatch.setattr(type(store), "append", None)
        original = type(store).read
        monkeypatch.setattr(
            type(store), "read", lambda self, epoch, *keys: read.append(epoch) or original(self, epoch, *keys)
        )
        fresh = log_of(group.store)
        assert read == [9]
        assert (fresh.view.members, fresh.view.owners, fresh.view.latest) == (
            log.view.members,
            log.view.owners,
            log.view.latest,
        )
        monkeypatch.undo()


def test_an_entry_before_a_checkpoint_of_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is faster by some entries: that is no reason to leave."""
    monkeypatch.setattr("telegrad.group.log._INTERVAL", 4)
    monkeypatch.setattr("telegrad.group.log._KEPT", 8)
    with cluster(1, dynamic=True) as group:
        one, other = (log_of(group.store, group[0]) for _ in range(2))
        original = one.store.append

        def append(epoch: int, entry: str) -> str:
            found = original(epoch, entry)
            other.refresh()
            for number in range(7):
                assert other.append(Leave(100 + number, 1))[0]
            return found

        monkeypatch.setattr(one.store, "append", append)
        assert one.append(Leave(99, 1))[0]
        assert one.view.epoch == 2
        one.refresh()
        assert one.view.epoch == 9


def test_a_checkpoint_does_not_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was stopped while it wrote one goes on when there are later ones."""
    monkeypatch.setattr("telegrad.group.log._INTERVAL", 4)
    monkeypatch.setattr("telegrad.group.log._KEPT", 8)
    with cluster(1, dynamic=True) as group:
        late = log_of(group.store, group[0])
        for _ in range(10):
            Worker("w1", store=group.store).shutdown(timeout=30)
        before = {key: late.store.get(key) for key in ("checkpoint", "deleted")}
        late._write_checkpoint(12)
        assert {key: late.store.get(key) for key in ("checkpoint", "deleted")} == before
        service = group[0]._worker.membership
        assert service is not None
        late.store.set("checkpoint", "forged")
        service.log._write_checkpoint(service.log.view.epoch)
        assert log_of(group.store).view.members.keys() == {0}


@pytest.mark.parametrize("key", ["checkpoint", "deleted"])
def test_a_join_succeeds_although_the_store_fails_after_its_entry(
    key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("telegrad.group.log._INTERVAL", 2)
    with cluster(1, dynamic=True) as group:
        log = log_of(group.store, group[0])
        get, entries = log.store.get, []

        def fail_after_entry(found: str) -> str | None:
            if found == key:
                raise RuntimeError("request is too large")
            return get(found)

        monkeypatch.setattr(log.store, "get", fail_after_entry)
        for number in range(4):
            written, _ = log.append(Leave(100 + number, 1))
            entries.append(written)
        assert entries == [True] * 4
        assert log.view.epoch == 5
        assert log_of(group.store).view.epoch == 5
    is_logged = "the checkpoint of epoch 4 of the group was not written: request is too large" in caplog.text
    assert is_logged == (key == "checkpoint")


def test_a_deletion_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that reads up to the gap is not up to date."""
    monkeypatch.setattr("telegrad.group.log._INTERVAL", 4)
    monkeypatch.setattr("telegrad.group.log._KEPT", 8)
    with cluster(1, dynamic=True) as group:
        late = log_of(group.store, group[0])
        monkeypatch.setattr(type(late.store), "forget", lambda self, epochs: group.store.delete_key("log/0000000005"))
        for _ in range(10):
            Worker("w1", store=group.store).shutdown(timeout=30)
        with pytest.raises(FellBehind):
            late.refresh()
        assert late.view.epoch == 4


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_old_entries_are_deleted(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that has not read them leaves."""
    monkeypatch.setattr("telegrad.group.log._INTERVAL", 4)
    monkeypatch.setattr("telegrad.group.log._KEPT", 8)
    with cluster(1, dynamic=True) as group:
        late = log_of(group.store, group[0])
        for _ in range(10 * steps):
            Worker("w1", store=group.store).shutdown(timeout=30)
        log = log_of(group.store, group[0])
        epoch = log.view.epoch
        assert epoch == 1 + 20 * steps
        kept = [n for n in range(1, epoch + 1) if group.store.check([f"log/{n:010}"])]
        first = epoch // 4 * 4 - 8 + 1
        assert kept == list(range(first, epoch + 1))
        with pytest.raises(FellBehind, match="has missed more than 8 changes of the group"):
            late.refresh()
        with pytest.raises(FellBehind):
            late.append(Leave(0, 1))
        assert sorted(members_of(group.store)) == ["w0"]
        service = group[0]._worker.membership
        assert service is not None
        service.log.view = late.view  # as if it had been stopped for all that time
        service.notify()
        eventually(group[0]._worker._close_done.is_set)
        assert "it has missed more than 8 changes of the group" in group[0]._worker.fenced
        group.workers.clear()
