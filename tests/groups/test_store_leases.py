"""Leases in stores that lose replies, or to which other programs write."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_helpers import TIMEOUT, actors, call_many
from test_membership_processes import assert_reached, join_all, join_static, leave_at_once, shut_down_all
from torch.distributed import HashStore  # type: ignore[attr-defined]

from telegrad.errors import TelegradError
from telegrad.group.group_store import C10dStore, GroupStore
from telegrad.group.lease import Lease, Taken, lease_key, read_lease, sealed_lease
from telegrad.group.records import Group
from telegrad.protocols.leases import NOT_RENEWED, Timing, holder_of, lease_value, released_value
from telegrad.rpc import Options
from telegrad.testing import cluster, eventually
from telegrad.waits import Wait
from telegrad.worker.default_worker import current_worker
from telegrad.worker.membership import service as membership_service

GROUP = Group("token", b"secret of the group", False)
OTHERS = Group("token", b"another secret", False)
ID = 3
KEY = lease_key(ID)
LONG = 30.0  # s


class Lossy(C10dStore):
    """Store that executes writes without a reply."""

    def __init__(self) -> None:
        super().__init__(HashStore())
        self.lost = 0  # replies to lose
        self.before: Callable[[], object] = lambda: None  # called before each write

    def compare_set(self, key: str, expected: str | None, desired: str, lifetime: float = 0) -> str | None:
        self.before()
        found = super().compare_set(key, expected, desired, lifetime)
        if self.lost:
            self.lost -= 1
            raise RuntimeError("wait timeout")
        return found


def lease_of(store: C10dStore, incarnation: int = 5, lifetime: float = 1000.0, least: int = 0) -> Lease:
    return Lease(store, GROUP, ID, "w", incarnation, Timing(lifetime), least)


def acquired(store: C10dStore, incarnation: int = 5) -> Lease:
    lease = lease_of(store, incarnation)
    lease.acquire(Wait("w", 1.0), lambda: "w")
    return lease


def forge(store: GroupStore, key: str, text: str) -> None:
    store.compare_set(key, store.get(key), text)  # which also writes bytes that are no text


def holder(store: C10dStore) -> int:
    return holder_of(read_lease(store, ID, GROUP))


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_a_lost_reply_to_a_renewal_is_no_other_process(lost: int) -> None:
    store = Lossy()
    lease = acquired(store)
    store.lost = lost
    for _ in range(lost):
        with pytest.raises(RuntimeError, match="wait timeout"):
            lease.renew()
    before = store.get(KEY)
    assert lease.renew()
    assert store.get(KEY) != before
    store.lost = 1
    with pytest.raises(RuntimeError, match="wait timeout"):
        lease.renew()
    lease.release()
    assert read_lease(store, ID, GROUP) == released_value(5, "w")


FORGERIES: dict[str, str] = {
    "nonsense": "nonsense",
    "empty": "",
    "no text": b"\xff\xfe".decode(errors="surrogateescape"),
    "deep": "[" * 100_000,
    "no seal": sealed_lease(ID, released_value(5, "w"), GROUP._replace(shared_secret=True)),
    "released": sealed_lease(ID, released_value(5, "w"), OTHERS),
    "newer": sealed_lease(ID, lease_value(9, "another", 0, 0, "w"), OTHERS),
    "of another id": sealed_lease(ID + 1, lease_value(9, "another", 0, 0, "w"), GROUP),
    "of an earlier process": sealed_lease(ID, released_value(4, "w"), GROUP),
}
written_by_others = pytest.mark.parametrize("forged", FORGERIES.values(), ids=FORGERIES.keys())


@written_by_others
def test_a_forged_lease_is_no_news_and_is_written_again(forged: str) -> None:
    store = Lossy()
    lease = acquired(store)
    forge(store, KEY, forged)
    assert read_lease(store, ID, GROUP, 5) == NOT_RENEWED
    assert lease.renew()
    assert holder(store) == 5


@written_by_others
def test_a_forged_lease_does_not_let_a_newcomer_in(forged: str) -> None:
    """The holder writes its own again, and is alive."""
    store = Lossy()
    lease = acquired(store)
    forge(store, KEY, forged)
    newcomer = lease_of(store, 6, lifetime=0.8, least=5)
    renewing = Wait("w", LONG)
    renewing.step = lambda _: lease.renew()  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(Taken):
        newcomer.acquire(renewing, lambda: "w")
    assert holder(store) == 5


def test_a_lease_that_the_store_has_deleted_is_written_again() -> None:
    store = Lossy()
    lease = acquired(store)
    store._store = HashStore()
    assert lease.renew()
    assert holder(store) == 5


@pytest.mark.parametrize(
    "value",
    [lease_value(6, "another", 0, 0, "w"), released_value(6, "w"), lease_value(1, "another", 0, 0, "other")],
    ids=["newer", "newer, released", "of another name"],
)
def test_a_later_holder_ends_the_lease(value: str) -> None:
    store = Lossy()
    lease = acquired(store)
    store.set(KEY, sealed_lease(ID, value, GROUP))
    assert not lease.renew()
    lease.release()
    assert read_lease(store, ID, GROUP) == value


def test_a_lease_that_another_program_overwrites_all_the_time() -> None:
    store = Lossy()
    lease = acquired(store)
    count = iter(range(100))
    store.before = lambda: store.set(KEY, f"forged {next(count)}")
    with pytest.raises(TelegradError, match=f"another program writes to the key {KEY} of the group's store"):
        lease.renew()
    store.before = lambda: None
    assert lease.renew()


@pytest.mark.parametrize("renews", [False, True])
def test_a_lease_that_a_failed_join_of_this_process_has_left(renews: bool) -> None:
    """A retry waits for its end, unless a worker of this process renews it."""
    store = Lossy()
    left = lease_of(store, 5, lifetime=1.0)
    left.acquire(Wait("w", 1.0), lambda: "w")
    retry = lease_of(store, 6, lifetime=1.0)
    waiting = Wait("w", LONG)
    waiting.step = lambda _: renews and left.renew()  # type: ignore[method-assign,assignment,return-value]
    if renews:
        with pytest.raises(Taken):
            retry.acquire(waiting, lambda: "w")
    retry.acquire(Wait("w", LONG), lambda: "w")
    assert holder(store) == 6


def test_a_lease_whose_acquisition_had_no_reply_is_released() -> None:
    store = Lossy()
    lease = lease_of(store)
    store.lost = 1
    with pytest.raises(RuntimeError, match="wait timeout"):
        lease.acquire(Wait("w", 1.0), lambda: "w")
    lease.release()
    assert read_lease(store, ID, GROUP) == released_value(5, "w")


@pytest.mark.parametrize("ended", [4, 5])
def test_a_lease_of_an_incarnation_that_has_ended(ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports that the process runs, the log that the worker has left."""
    monkeypatch.setattr("telegrad.group.lease.fate_of", lambda _: "running")
    store = Lossy()
    acquired(store)
    monkeypatch.setattr("telegrad.group.lease.own_process", lambda: "another")
    lease = Lease(store, GROUP, ID, "w", 6, Timing(1000.0), 0, ended)
    if ended < 5:
        with pytest.raises(Taken, match="w is alive"):
            lease.acquire(Wait("w", 1.0), lambda: "w")
    else:
        lease.acquire(Wait("w", 1.0), lambda: "w")
        assert holder_of(read_lease(store, ID, GROUP)) == 6


@pytest.mark.openssl
@written_by_others
def test_a_forged_lease_removes_no_member(forged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members are on different hosts: no kernel reports of them."""
    monkeypatch.setattr(membership_service, "fate_of", lambda *_, **__: "unknown")
    store: Any = HashStore()
    with cluster(2, Options(secret="secret of the group", member_lease=0.8), store=store, dynamic=True) as group:
        services = [worker._worker.membership for worker in group]
        for service in services:
            assert service is not None
            renewed = service.renewed
            forge(service.log.store, lease_key(0), forged)
            forge(service.log.store, lease_key(1), forged)
            for _ in range(3):
                eventually(lambda s=service, r=renewed: s.renewed > r, timeout=LONG)  # type: ignore[misc]
                renewed = service.renewed
        assert [info.name for info in group[0].get_worker_infos()] == ["w0", "w1"]
        assert group[0].rpc_sync("w1", abs, (-1,)) == group[1].rpc_sync("w0", abs, (-1,)) == 1


# ---- with processes


def hold_the_gil(seconds: float) -> None:
    import ctypes

    ctypes.PyDLL("libc.so.6").usleep(int(seconds * 1e6))


def fenced() -> str:
    worker = current_worker()
    return "closed" if worker is None else worker.fenced


def test_the_host_of_the_store_holds_the_gil(tmp_path: Path) -> None:
    """Then it executes requests that the others have given up on."""
    with actors(3, tmp_path, method="tcp", rpc_timeout=0.5, member_lease=1.0) as group:
        group[0].do(call_many, "w1", 2)
        group[0].do(hold_the_gil, 3.0)
        for _ in range(2):
            for actor in group:
                for other in group:
                    assert actor.do(call_many, other.name, 3) == 3
            group[1].do(hold_the_gil, 1.0)  # for some renewals of the others
        assert [actor.do(fenced) for actor in group] == ["", "", ""]
        assert all("out of its group" not in actor.stderr() for actor in group)


def fail_to_release() -> None:
    def release(_: Lease) -> None:
        raise RuntimeError("the store is silent")

    Lease.release = release  # type: ignore[method-assign]


def ranks() -> list[int]:
    service = current_worker().membership  # type: ignore[union-attr]
    assert service is not None
    return sorted(service.log.view.members)


def test_a_rank_whose_lease_was_not_released_is_free_once_it_expires(tmp_path: Path) -> None:
    """Its process has said goodbye, and goes on."""
    file = f"file://{tmp_path}/meeting"
    with actors(3, tmp_path, method="none") as (first, old, new):
        join_all([first, old], file)
        assert old.do(call_many, "w0", 2) == 2
        old.do(fail_to_release)
        old.do(leave_at_once)
        assert "worker w1 could not release its lease" in old.stderr()
        eventually(lambda: first.do(ranks) == [0], timeout=TIMEOUT)
        new.do(join_static, "w1", 1, 2, file)
        assert_reached(new, "w1", first)
        shut_down_all([first, new])


def test_a_suspect_is_checked_again_after_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2, Options(member_lease=1.0), dynamic=True, graceful=False) as group:
        service = group[0]._worker.membership
        assert service is not None
        check, checked = type(service)._check, list[int]()

        def fails_once(self: Any, peer: int, *args: Any) -> None:
            checked.append(peer)
            if len(checked) == 1:
                raise RuntimeError("the store is silent")
            check(self, peer, *args)

        monkeypatch.setattr(type(service), "_check", fails_once)
        service.suspect(1, group[1]._worker.incarnation, "no route", False)
        eventually(lambda: checked == [1, 1])


def test_a_notice_during_a_late_renewal_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next renewal is due when the thread finds the notice."""
    with cluster(1, Options(member_lease=0.8), dynamic=True) as group:
        service = group[0]._worker.membership
        assert service is not None
        service._observation = math.inf  # no reading of the log without a notice
        renews, goes_on = threading.Event(), threading.Event()
        renew = service._lease.renew

        def late() -> bool:
            renews.set()
            goes_on.wait(LONG)
            return renew()

        monkeypatch.setattr(service._lease, "renew", late)
        assert renews.wait(LONG)
        late_at = time.monotonic() + service.timing.renewal
        noticed = threading.Event()
        service._refreshes.append(noticed)
        service.notify()
        eventually(lambda: time.monotonic() > late_at)
        goes_on.set()
        assert noticed.wait(2.0)
