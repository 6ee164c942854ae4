"""Attempts of a static group that a worker may come back to."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from telegrad import rpc
from telegrad.group import attempts, rendezvous, store_parts
from telegrad.group.group_store import C10dStore
from telegrad.group.lease import lease_key, sealed_lease
from telegrad.group.records import Group
from telegrad.group.store_parts import Part
from telegrad.protocols.leases import Timing, lease_value
from telegrad.rpc import Options, Worker
from telegrad.testing import cluster

LIFETIME = 8.0  # s
NO_GROUP = Group("", b"", False)
_PRINT = "from telegrad.group.process_identity import own_process; print(own_process(), flush=True); input()"


@pytest.fixture
def process() -> Iterator[str]:
    """Run another process of this host, and return its identity."""
    with subprocess.Popen([sys.executable, "-c", _PRINT], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        yield child.stdout.readline().strip()
        child.kill()


def pulse_with(holder: str) -> tuple[attempts._Pulse, HashStore]:
    """Return the observation of rank 0 of a group in which rank 1 holds a lease."""
    store = HashStore()
    rendezvous.agree(store, None, True, 2)
    write_lease(store, holder, 0)
    return attempts._Pulse(store, 0, Timing(LIFETIME)), store


def write_lease(store: HashStore, holder: str, count: int) -> None:
    store.set(lease_key(1), sealed_lease(1, lease_value(5, holder, count, LIFETIME, "w1"), NO_GROUP))


def test_a_process_of_this_host_lives_although_it_renews_nothing(process: str) -> None:
    pulse, _ = pulse_with(process)
    assert pulse.observe() is True


def test_another_host_counts_as_dead_only_after_the_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("telegrad.group.attempts.time.monotonic", lambda: now[0])
    pulse, store = pulse_with("another host/1/1")
    for _ in range(7):
        now[0] += LIFETIME / 8
        assert pulse.observe() is None
    write_lease(store, "another host/1/1", 1)  # late
    now[0] += LIFETIME / 8
    assert pulse.observe() is True

    pulse, store = pulse_with("another host/1/1")
    for _ in range(9):
        now[0] += LIFETIME / 8
        found = pulse.observe()
    assert found is False


def test_a_rank_of_a_run_leaves_the_ended_group_of_a_rank_0_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    store = HashStore()
    store.set("rank/0", "w0")
    found = attempts.Attempts(store, "w1", 1, 0.2, Timing(LIFETIME))
    assert found.part() is store
    assert not found.another(rendezvous.GroupEnded()), "it would find the same group again"
    assert found.another(rendezvous.JoinRefused("another secret"))
    with pytest.raises(rendezvous.JoinRefused, match="another secret"):
        found.part()


def test_an_ended_group_takes_no_member_back_although_a_process_of_it_lives(
    process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "outlives_groups", lambda _: True)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    store, timing = HashStore(), Timing(LIFETIME)
    others = attempts.Attempts(store, "w1", 1, LIFETIME, timing)
    first = attempts.Attempts(store, "w0", 0, LIFETIME, timing).part()
    group = rendezvous.agree(first, None, True, 2).group
    first.set("members", json.dumps({"members": []}))
    for rank in (0, 1):
        first.set(lease_key(rank), sealed_lease(rank, lease_value(5, process, 0, LIFETIME, f"w{rank}"), NO_GROUP))
    assert attempts.Attempts(store, "w0", 0, LIFETIME, timing).part().part == others.part().part == first.part
    rendezvous.mark_ended(C10dStore(first), group, 2, LIFETIME)
    with pytest.raises(rendezvous.GroupEnded):
        rendezvous.agree(first, None, True, 2)
    assert not others._has_room(first.part)
    following = attempts.Attempts(store, "w0", 0, LIFETIME, timing).part()
    assert following.part != first.part
    assert others.part().part == following.part


def test_a_worker_joins_the_next_group_of_a_store_of_the_program() -> None:
    """The process has joined no group before, so it finds the part of an ended one."""
    store = HashStore()
    ended = Part("rpc_prefix_7", store)
    group = rendezvous.agree(ended, None, True, 2).group
    assert rendezvous.is_static(ended)
    rendezvous.mark_ended(C10dStore(ended), group, 2, LIFETIME)
    assert not rendezvous.is_static(ended), "a dynamic group may follow"
    tried = []

    def join(part: Part, rank: int, world_size: int | None) -> int:
        tried.append(part.part)
        rendezvous.agree(part, None, True, 2)
        return rank

    numbers = store_parts._Numbers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_parts, "_numbers", numbers)
        assert store_parts.join_open_part(store, "place", "rpc_prefix_7", join, 1, 2) == 1
    assert tried == ["rpc_prefix_7", "rpc_prefix_8"]
    assert numbers.next("place") == 9


@pytest.mark.openssl
def test_a_list_with_an_earlier_process_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart a rank while its group meets, before it reads the list."""
    options = Options(secret="a secret of these tests")
    with cluster(2, options) as group:
        earlier = group.workers.pop()
        earlier.shutdown(graceful=False)
        agree, unread = rendezvous.agree, [True]

        def agree_without_list(*arguments: Any) -> rendezvous.Agreement:
            agreed = agree(*arguments)
            return agreed._replace(members=None) if unread and unread.pop() else agreed

        monkeypatch.setattr(rendezvous, "agree", agree_without_list)
        group.workers.append(Worker("w1", 1, 2, options, store=group.store))
        assert not unread
        again = group[1]._worker
        assert again.membership is not None
        assert again.membership.log.view.has(1, again.incarnation)
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1
