"""Attempts of a static group that a worker may come back to."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from telegrad import rpc
from telegrad.group import attempts, rendezvous
from telegrad.group.lease import lease_key, sealed_lease
from telegrad.group.records import Group
from telegrad.protocols.leases import Timing, lease_value
from telegrad.rpc import Options, Worker
from telegrad.testing import cluster

LIFETIME = 8.0  # s
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
    store.set(lease_key(1), sealed_lease(1, lease_value(5, holder, count, LIFETIME, "w1"), Group("", b"", False)))


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


@pytest.mark.openssl
def test_a_list_with_an_earlier_process_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart a rank while its group meets, before it reads the list."""
    options = Options(secret="a secret of these tests")
    with cluster(2, options) as group:
        earlier = group.workers.pop()
        earlier.shutdown(graceful=False)
        read, unread = rendezvous.read_list, [True]
        monkeypatch.setattr(rendezvous, "read_list", lambda *args: None if unread and unread.pop() else read(*args))
        group.workers.append(Worker("w1", 1, 2, options, store=group.store))
        assert not unread
        again = group[1]._worker
        assert again.membership is not None
        assert again.membership.log.view.has(1, again.incarnation)
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1
