"""Lost connections of members to the c10d store of their group."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from membership_helpers import members_of
from proxy_helpers import Proxy
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from telegrad.group.group_store import C10dStore
from telegrad.group.lease import lease_key
from telegrad.group.store_waits import StoreGone
from telegrad.protocols.membership import Lose
from telegrad.rpc import Options, Worker
from telegrad.testing import eventually
from telegrad.worker.membership import service as membership_service
from telegrad.worker.membership.service import MembershipService

LONG = 30.0  # s
LEASE = 2.0  # s


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def service_of(worker: Worker) -> MembershipService:
    service = worker._worker.membership
    assert service is not None
    return service


@contextmanager
def proxied_store() -> Iterator[tuple[TCPStore, Proxy, TCPStore]]:
    """Yield a store, a proxy for it, and a client of the store behind the proxy."""
    store, proxy = new_store(), Proxy()
    try:
        proxy.target = "127.0.0.1", store.port
        yield store, proxy, TCPStore("127.0.0.1", proxy.port, is_master=False, wait_for_workers=False)
    finally:
        proxy.close()


@contextmanager
def two_workers(lease: float, prefix: str = "") -> Iterator[tuple[TCPStore, Proxy, Worker, Worker]]:
    """Yield a store, a proxy for it, and two workers; the second one uses it."""
    options = Options(member_lease=lease, rpc_timeout=LONG)
    with proxied_store() as (store, proxy, behind):
        workers = [
            Worker(name, options=options, store=PrefixStore(prefix, each) if prefix else each)
            for name, each in (("w0", store), ("w1", behind))
        ]
        try:
            yield store, proxy, workers[0], workers[1]
        finally:
            for worker in workers:
                worker.shutdown(timeout=LONG)


@pytest.fixture
def another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members count as processes of other hosts, whose ends no kernel reports."""
    monkeypatch.setattr(membership_service, "fate_of", lambda *_, **__: "unknown")


@pytest.mark.parametrize("prefix", ["", "part"])
@pytest.mark.usefixtures("another_host")
def test_member_connects_to_the_store_again(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "telegrad")
    with two_workers(LEASE, prefix) as (_, proxy, first, second):
        reference = first.remote("w1", dict)
        assert reference.to_here() == {}
        for _ in range(2):
            proxy.reset()
            before = service_of(first).log.store.get(lease_key(1))
            seen = {before}

            def is_renewed(seen: set[str | None] = seen) -> bool:
                seen.add(service_of(first).log.store.get(lease_key(1)))
                return len(seen) > 10  # for longer than a lease

            eventually(is_renewed, timeout=LONG)
        assert {info.name for info in first.get_worker_infos()} == {"w0", "w1"}
        assert first.rpc_sync("w1", abs, (-1,)) == second.rpc_sync("w0", abs, (-1,)) == 1
        assert reference.to_here() == {}
        assert caplog.text.count("worker w1 has connected to the store of its group again") >= 2
        assert "goes on without the store" not in caplog.text
        del reference


def test_member_that_was_removed_in_the_meantime_is_fenced() -> None:
    with two_workers(8.0) as (_, proxy, first, second):
        proxy.open = False
        proxy.reset()
        core, log = second._worker, service_of(first).log
        assert log.append(Lose(core.info.id, core.incarnation, "it was silent"))[0]  # before any worker reads it
        accepted = proxy.accepted
        eventually(lambda: proxy.accepted > accepted, timeout=LONG)
        assert not core.fenced
        proxy.open = True
        eventually(core._close_done.is_set, timeout=LONG)
        assert core.fenced.startswith("worker w1 is out of its group: it was silent")


def test_member_leaves_after_a_lost_connection() -> None:
    """The entry goes through a new connection."""
    with two_workers(1000.0) as (_, proxy, first, second):
        proxy.reset()
        second.shutdown(timeout=LONG)
        assert sorted(members_of(first._worker.store)) == ["w0"]


def test_store_of_another_group_at_the_address(caplog: pytest.LogCaptureFixture) -> None:
    """The worker writes nothing to it, and goes on without a store."""
    caplog.set_level("INFO", "telegrad")
    other = new_store()
    keys = other.num_keys()
    with two_workers(LEASE) as (_, proxy, first, second):
        proxy.target = "127.0.0.1", other.port
        proxy.reset()
        eventually(
            lambda: "worker w1 goes on without the store of its group: the store at" in caplog.text, timeout=LONG
        )
        assert second.rpc_sync("w0", abs, (-1,)) == first.rpc_sync("w1", abs, (-1,)) == 1
        assert other.num_keys() == keys


def test_operations_fail_until_the_store_is_verified() -> None:
    with proxied_store() as (_, proxy, behind):
        store = C10dStore(behind)
        store.set("key", "value")
        assert store.reconnect(LONG, lambda _: False), "there is nothing to do"
        proxy.reset()
        for _ in range(2):
            with pytest.raises(StoreGone):
                store.get("key")
        with pytest.raises(StoreGone, match="is not that of the group"):
            store.reconnect(LONG, lambda _: False)
        with pytest.raises(StoreGone):
            store.get("key")
        assert store.reconnect(LONG, lambda found: found.get("key") == b"value")
        assert store.get("key") == "value"


class Breaking(HashStore):  # type: ignore[misc]
    """Store of a program that cannot be cloned."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise StoreGone("broken")


def test_store_that_cannot_be_cloned() -> None:
    store = C10dStore(Breaking())
    with pytest.raises(StoreGone, match="broken"):
        store.get("key")
    assert not store.reconnect(LONG, lambda _: True)
