"""A newcomer asks for the name of a member after the expiry of its lease.

All workers count as processes of other hosts: no kernel reports of their ends.
"""

import contextlib
import dataclasses
import json
import threading
from typing import Any

import pytest
from membership_helpers import add_member, log_of, members_of, silent_address, unused_address
from torch.distributed import HashStore  # type: ignore[attr-defined]

from telegrad.errors import TelegradError
from telegrad.group.group_store import log_key
from telegrad.group.holder import Holder
from telegrad.group.lease import lease_key
from telegrad.protocols.leases import Watch
from telegrad.rpc import Options, Worker
from telegrad.testing import Cluster, cluster, eventually
from telegrad.worker.membership import holder_dial
from telegrad.worker.membership import service as membership_service
from telegrad.worker.membership.service import MembershipService

LONG = 30.0  # s
SHORT = Options(member_lease=0.8, heartbeat=1.0, transports=("tcp",), rpc_timeout=LONG)

pytestmark = pytest.mark.usefixtures("other_hosts")


@pytest.fixture
def other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_service, "fate_of", lambda *_, **__: "unknown")


def service_of(worker: Worker) -> MembershipService:
    service = worker._worker.membership
    assert service is not None
    return service


def state_of(group: Cluster, worker: Worker) -> tuple[object, ...]:
    log = log_of(group.store)
    return log.view.epoch, members_of(group.store), log.store.get(lease_key(worker.info.id))


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize(
    ("rank", "said"),
    [(-1, "which is in the group already: its process is alive"), (9, "w{0} is not unique. Workers {0} and 9")],
    ids=["its rank", "another rank"],
)
def test_a_live_member_keeps_its_name(others: int, rank: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The member has lost only its store, so its lease expires."""
    with cluster(1 + others, SHORT, store=HashStore(), dynamic=True) as group:
        holder = group[-1]
        monkeypatch.setattr(service_of(holder)._lease, "renew", lambda: True)
        before = state_of(group, holder)
        with pytest.raises(TelegradError, match=said.format(others)):
            Worker(holder.info.name, rank, options=SHORT, store=group.store)
        assert state_of(group, holder) == before
        monkeypatch.undo()
        renewed = service_of(holder).renewed
        eventually(lambda: service_of(holder).renewed > renewed, timeout=LONG)
        assert not holder._worker.fenced
        assert [worker.rpc_sync(holder.info.name, abs, (-1,)) for worker in group] == [1] * len(group)
        assert holder._worker.members.lost == {}  # the dial was no session


@pytest.mark.parametrize(
    "options",
    [
        dataclasses.replace(SHORT, transports=Options().transports),
        pytest.param(dataclasses.replace(SHORT, secret="secret of the group"), marks=pytest.mark.openssl),
    ],
    ids=["all transports", "encrypted"],
)
def test_a_live_member_proves_itself(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(1, options, store=HashStore(), dynamic=True) as group:
        monkeypatch.setattr(service_of(group[0])._lease, "renew", lambda: True)
        with pytest.raises(TelegradError, match="its process is alive"):
            Worker("w0", options=options, store=group.store)


@pytest.mark.parametrize("rank", [-1, 9])
def test_a_member_that_only_others_reach_keeps_its_name(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_dial, "candidates", lambda *_: [])
    with cluster(2, SHORT, store=HashStore(), dynamic=True) as group:
        assert group[0].rpc_sync("w1", abs, (-1,)) == 1
        monkeypatch.setattr(service_of(group[1])._lease, "renew", lambda: True)
        before = state_of(group, group[1])
        said = (
            r"its process does not answer this worker, but the group, with w0, has not lost it, .* 3 s \(rpc_timeout\)"
        )
        with pytest.raises(TelegradError, match=said):
            Worker("w1", rank, None, Options(member_lease=0.8, rpc_timeout=3.0), store=group.store)
        assert state_of(group, group[1]) == before
        assert group[0].rpc_sync("w1", abs, (-1,)) == group[1].rpc_sync("w0", abs, (-1,)) == 1


def entries(group: Cluster) -> list[int]:
    """Return the kinds of the entries of the log: 0 for a join, 2 for a loss."""
    log = log_of(group.store)
    texts = [log.store.get(log_key(epoch)) for epoch in range(1, log.view.epoch + 1)]
    return [json.loads(text)[0][1] for text in texts if text is not None]


def test_the_others_lose_a_dead_member_before_its_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    observed, outvoted = threading.Event(), threading.Event()
    observe, has_ended = MembershipService._observe, Holder.has_ended

    def observe_later(self: MembershipService, *args: Any) -> None:
        if observed.is_set():
            observe(self, *args)

    def note(self: Holder, watch: Watch) -> bool:
        ended = has_ended(self, watch)
        if self.outvoted == "w0":
            outvoted.set()
        return ended

    monkeypatch.setattr(MembershipService, "_observe", observe_later)
    monkeypatch.setattr(Holder, "has_ended", note)
    with cluster(1, SHORT, store=HashStore(), dynamic=True) as group:
        dead = add_member(group.store, group[0], "x", unused_address())
        join = threading.Thread(
            target=lambda: group.workers.append(Worker("x", options=SHORT, store=group.store)), daemon=True
        )
        join.start()
        assert outvoted.wait(LONG)
        assert members_of(group.store)["x"].incarnation == dead.incarnation
        observed.set()
        join.join(LONG)
        assert (group[1].info.id, group[0].rpc_sync("x", abs, (-1,))) == (dead.id, 1)
        assert entries(group) == [0, 0, 2, 0]


@pytest.mark.parametrize("dead", [contextlib.nullcontext, silent_address], ids=["no process", "silent host"])
def test_without_other_live_members_the_lease_of_a_dead_member_decides(dead: Any) -> None:
    options = dataclasses.replace(SHORT, heartbeat=0.4)  # the dial of a silent host ends after 1.2 s
    with dead() as address, cluster(1, options, store=HashStore(), dynamic=True) as group:
        old = add_member(group.store, group[0], "x", address or unused_address(), rank=5)
        add_member(group.store, group[0], "y", unused_address(), rank=6)
        group.shutdown()
        group.workers.append(Worker("x", options=options, store=group.store))
        assert group[0].info.id == old.id
        assert group[0]._worker.incarnation > old.incarnation
