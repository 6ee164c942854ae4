"""A newcomer connects to the live members before it joins."""

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from membership_helpers import add_member, log_of, members_of, silent_address, unused_address
from raw_peer_helpers import REFUSE, frame, text
from torch.distributed import HashStore  # type: ignore[attr-defined]

from telegrad import rpc
from telegrad.errors import TelegradError, WorkerLost
from telegrad.group.lease import Lease, lease_key, sealed_lease
from telegrad.group.process_identity import own_process
from telegrad.protocols.leases import Timing, lease_value
from telegrad.rpc import Options, Worker
from telegrad.testing import Gate, cluster, eventually
from telegrad.waits import Wait
from telegrad.wire import Loss
from telegrad.worker.membership import joining
from telegrad.worker.worker import Worker as Core

PATIENT = Options(member_lease=20.0, transports=("tcp",), rpc_timeout=30)
QUICK = Options(member_lease=2.0, transports=("tcp",), rpc_timeout=30)
SOON = 2.0  # s


@contextmanager
def refusing_address(why: str) -> Iterator[str]:
    """Yield the address of a worker that refuses each newcomer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    link, _ = listening.accept()
                except OSError:
                    return
                link.recv(1 << 16)
                link.sendall(frame(REFUSE, text(why)))
                link.shutdown(socket.SHUT_WR)
                while link.recv(1 << 16):  # a close with unread bytes would discard the reply
                    pass
                link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp:127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def renewed_lease(store: Any, like: Worker, rank: int, incarnation: int) -> Iterator[None]:
    """Renew the lease of a member that has no process."""
    stop = threading.Event()

    def renew() -> None:
        count = 0
        while not stop.wait(0.05):
            count += 1
            value = lease_value(incarnation, "", count)
            log_of(store).store.set(lease_key(rank), sealed_lease(rank, value, like._worker.group))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_join_does_not_wait_for_a_busy_member() -> None:
    """A member with no free thread stays a member, and the newcomer joins at once."""
    gate = Gate()
    with cluster(1, Options(num_worker_threads=1), dynamic=True) as group:
        busy = rpc.rpc_async("w0", gate.enter)
        gate.wait_for()
        begun = time.monotonic()
        group.workers.append(Worker("w1", options=Options(rpc_timeout=30), store=group.store))
        assert time.monotonic() - begun < SOON
        assert sorted(members_of(group.store)) == ["w0", "w1"]
        assert [info.name for info in group[1].get_worker_infos()] == ["w0", "w1"]
        assert [info.name for info in group[0].get_worker_infos()] == ["w0", "w1"]  # without a handler
        gate.open()
        busy.wait()
        assert group[1].rpc_sync("w0", abs, (-1,)) == group[0].rpc_sync("w1", abs, (-1,)) == 1


def test_workers_that_have_left_make_room(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(1, dataclasses.replace(QUICK, max_peers=2), store=HashStore(), dynamic=True) as group:
        for number in range(5):
            guest = Worker(f"guest{number}", options=QUICK, store=group.store)
            assert guest.rpc_sync("w0", abs, (-1,)) == 1
            if number == 0:
                with pytest.raises(TelegradError, match="refused by the peer"):
                    Worker("w9", options=QUICK, store=group.store)
                assert "Raise the option on w0, or let other workers leave first." in caplog.text
            guest.shutdown()
            eventually(lambda: group[0].debug_info().limits["max_peers"].used == 1)


def test_silent_member_stays_a_member() -> None:
    """Neither a newcomer nor its silence alone removes it: its lease has not expired."""
    store = HashStore()
    with silent_address() as address, cluster(1, QUICK, store=store, dynamic=True) as group:
        add_member(store, group[0], "mute", address)
        begun = time.monotonic()
        group.workers.append(Worker("w1", options=QUICK, store=store))
        assert time.monotonic() - begun < SOON
        assert sorted(members_of(store)) == ["mute", "w0", "w1"]
        assert "mute" in [info.name for info in group[1].get_worker_infos()]


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("protocol version 4 is not 5", "refused by the peer: protocol version 4 is not 5"),  # an older version
        ("refused", "refused by the peer, which logs the reason: this worker has another secret, group or version"),
    ],
)
def test_newcomer_that_a_member_refuses(word: str, error: str) -> None:
    store = HashStore()
    with refusing_address(word) as address, cluster(1, PATIENT, store=store, dynamic=True) as group:
        add_member(store, group[0], "strict", address)
        before = log_of(store).view.epoch
        with pytest.raises(TelegradError, match=f"no connection to its live member strict .*: {error}"):
            Worker("w1", options=PATIENT, store=store)
        assert (log_of(store).view.epoch, sorted(members_of(store))) == (before, ["strict", "w0"])


class LostCall:
    """Call that has ended with the loss of its callee."""

    def __init__(self, loss: Loss) -> None:
        self.error = WorkerLost("w0", "the connection was closed, for the test")
        self.error._loss = loss

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[["LostCall"], None]) -> None:
        callback(self)

    def cancel(self) -> None:
        pass

    def wait(self) -> None:
        raise self.error


@pytest.mark.parametrize("loss", Loss)
def test_newcomer_whose_first_connection_is_lost(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect again if the member has closed the connection.

    It may have closed the connections of an earlier process of this name.
    """
    start = Core.start_internal
    pings: list[int] = []

    def start_internal(worker: Core, to: int, func: object, *arguments: Any) -> Any:
        pings.append(to)
        return LostCall(loss) if len(pings) == 1 else start(worker, to, func, *arguments)

    with cluster(1, QUICK, store=HashStore(), dynamic=True) as group:
        monkeypatch.setattr(Core, "start_internal", start_internal)
        if loss == Loss.CLOSED:
            group.workers.append(Worker("w1", options=QUICK, store=group.store))
        else:
            with pytest.raises(TelegradError, match="no connection to its live member w0"):
                Worker("w1", options=QUICK, store=group.store)
        assert pings == ([0, 0] if loss == Loss.CLOSED else [0])


def test_newcomer_that_cannot_reach_a_live_member() -> None:
    store = HashStore()
    with cluster(1, QUICK, store=store, dynamic=True) as group:
        member = add_member(store, group[0], "hidden", unused_address())
        before = log_of(store).view.epoch
        with renewed_lease(store, group[0], member.id, member.incarnation):
            with pytest.raises(TelegradError, match=r"no connection to its live member hidden .*Connection refused"):
                Worker("w1", options=QUICK, store=store)
            assert log_of(store).view.epoch == before
            assert sorted(members_of(store)) == ["hidden", "w0"]
        group.workers.append(Worker("w1", options=QUICK, store=store))  # once the member is silent
        assert sorted(members_of(store)) == ["hidden", "w0", "w1"]


@pytest.mark.openssl
def test_newcomer_with_another_secret() -> None:
    store = HashStore()
    with cluster(1, Options(secret="one secret of ours"), store=store, dynamic=True) as group:
        before = log_of(store).view.epoch
        with pytest.raises(TelegradError, match="not made with the group's secret"):
            Worker("w1", options=Options(secret="another secret of ours"), store=store)
        assert log_of(store).view.epoch == before
        assert [info.name for info in group[0].get_worker_infos()] == ["w0"]
        group.workers.append(Worker("w1", options=Options(secret="one secret of ours"), store=store))
        assert group[0].rpc_sync("w1", abs, (-1,)) == 1


def test_many_newcomers_at_once() -> None:
    """Each has an id of its own, and all agree on the members."""
    store = HashStore()
    joined: list[Worker] = []

    def join(name: str) -> None:
        joined.append(Worker(name, options=Options(rpc_timeout=30), store=store))

    threads = [threading.Thread(target=join, args=(f"w{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({worker.info.id for worker in joined}) == 6
    names = sorted(worker.info.name for worker in joined)
    for worker in joined:
        assert sorted(info.name for info in worker.get_worker_infos()) == names
        assert [worker.rpc_sync(name, abs, (-1,)) for name in names] == [1] * 6
    ends = [threading.Thread(target=worker.shutdown, kwargs={"timeout": 30}) for worker in joined]
    for end in ends:
        end.start()
    for end in ends:
        end.join(30)
    assert members_of(store) == {}


def test_ids_are_not_used_again() -> None:
    """Only the same name gets the id of a worker that has left."""
    with cluster(1, dynamic=True) as group:
        first = Worker("w1", store=group.store)
        incarnation = first._worker.incarnation
        assert first.info.id == 1
        first.shutdown(timeout=30)
        other = Worker("w2", store=group.store)
        again = Worker("w1", store=group.store)
        assert (other.info.id, again.info.id) == (2, 1)
        assert again._worker.incarnation > incarnation
        with pytest.raises(RuntimeError, match="Rank 2 is taken twice: by workers w2 and w3"):
            Worker("w3", 2, store=group.store)
        other.shutdown(timeout=30)
        with pytest.raises(RuntimeError, match="Rank 2 belonged to worker w2, and no other name gets it"):
            Worker("w3", 2, store=group.store)
        again.shutdown(timeout=30)


def test_name_of_a_live_worker() -> None:
    with cluster(1, dynamic=True) as group:
        for rank, said in ((-1, "rank 0 is taken by worker w0, which is in the group already"), (5, "not unique")):
            with pytest.raises(TelegradError, match=said) as refusal:
                Worker("w0", rank, store=group.store)
            assert type(refusal.value) is TelegradError
        assert group[0].rpc_sync("w0", abs, (-1,)) == 1


def test_two_newcomers_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have reserved ranks before either has joined: the second one to join fails."""
    with cluster(1, dynamic=True) as group:
        faster: list[Worker] = []
        original = joining.commit

        def commit(*args: Any) -> None:
            if not faster:
                monkeypatch.setattr(joining, "commit", original)
                faster.append(Worker("x", 2, store=group.store))
            original(*args)

        monkeypatch.setattr(joining, "commit", commit)
        with pytest.raises(RuntimeError, match=r"name x is not unique\. Workers 1 and 2 share the same name"):
            Worker("x", 1, store=group.store)
        assert group[0].rpc_sync("x", abs, (-1,)) == 1
        assert not faster[0]._worker.fenced
        assert faster[0]._worker.info.id == 2
        group.workers.append(faster[0])


def process_1() -> str:
    """Return the identity of another process of this host."""
    started = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
    return f"{own_process().rpartition('/')[0].rpartition('/')[0]}/1/{started}"


def test_rank_of_a_newcomer_that_never_joined() -> None:
    """The rank is free for another name once the newcomer has ended."""
    with cluster(1, dynamic=True) as group:
        log = log_of(group.store, group[0])
        for key, value in (("rank/5", "x"), ("id/x", "5")):
            log.store.set(key, value)
        lease = Lease(log.store, group[0]._worker.group, 5, "x", 1, Timing(1000.0))
        lease._process = process_1()
        lease.acquire(Wait("x", 1.0), lambda: "x")
        with pytest.raises(RuntimeError, match="rank 5 is taken by worker x, which joins it"):
            Worker("y", 5, store=group.store)
        lease.release()
        group.workers += [Worker("y", 5, store=group.store), Worker("x", store=group.store)]
        assert (group[1]._worker.info.id, group[0].rpc_sync("y", abs, (-1,))) == (5, 1)
        assert group[2]._worker.info.id != 5


def test_a_wait_that_is_shorter_than_the_lease_says_so() -> None:
    options = Options(rpc_timeout=0.2, member_lease=1000.0)
    with cluster(1, options, dynamic=True) as group:
        log = log_of(group.store, group[0])
        value = lease_value(1, "another host/1/1", 0, 1000.0, "x")
        log.store.set(lease_key(5), sealed_lease(5, value, group[0]._worker.group))
        with pytest.raises(RuntimeError, match=r"has ended at most 1000 s \(member_lease\) ago, or is alive"):
            Worker("y", 5, None, options, store=group.store)


def test_worker_that_closed_without_a_shutdown_comes_back_at_once() -> None:
    with cluster(1, dynamic=True) as group:
        for turn in range(3):
            worker = Worker("w1", store=group.store)
            assert group[0].rpc_sync("w1", abs, (-turn,)) == turn
            worker.shutdown(graceful=False)
