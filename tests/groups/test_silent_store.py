"""Shutdowns with a store that does not reply: they end within their timeout."""

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from free_ports import free_port
from process_helpers import TIMEOUT, actors, state

from telegrad import rpc
from telegrad.errors import RpcTimeout, ShutdownTimeout, UnknownWorker
from telegrad.group import rendezvous
from telegrad.group.group_store import C10dStore
from telegrad.group.store_waits import BoundedStore, Operation, StoreUnresponsive, within
from telegrad.rpc import Options, Worker, services
from telegrad.testing import cluster, eventually, run_all
from telegrad.worker.membership import service as membership_service
from telegrad.worker.membership import shutdown_barrier

SOON = 0.3  # s
END = 10.0  # s
LATEST = SOON + 2.0  # s: one for the steps after the timeout, and one for a busy machine


@pytest.fixture
def long_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for the membership thread if no timeout limits that."""
    monkeypatch.setattr(membership_service, "_STOP_TIMEOUT", END)


def host_store(port: int) -> None:
    state["store"] = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("long_stop")
def test_a_member_leaves_while_the_stores_host_is_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with actors(1, tmp_path, method="none") as (host,):
        host.do(host_store, port)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT))  # type: ignore[attr-defined]
        worker = Worker("w0", store=store)
        host.stop()
        start = time.monotonic()
        run_all([lambda: worker.shutdown(timeout=SOON)], timeout=END)
        assert time.monotonic() - start < LATEST
        assert worker._worker.closed
        host.resume()
    assert (
        "w0 leaves its group without the store; its host does not reply: the host of the group's store" in caplog.text
    )


class Silent:
    """Store that can stop replying."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self.answers = threading.Event()
        self.answers.set()
        self.waiting = 0  # threads
        self.fails, self.failures = False, 0  # operations that have timed out
        self.error: type[RuntimeError] = dist.DistStoreError

    def __getattr__(self, name: str) -> Any:
        if self.fails:
            self.failures += 1
            raise self.error("wait timeout")
        if not self.answers.is_set():
            self.waiting += 1
            self.answers.wait()
            self.waiting -= 1
        return getattr(self.store, name)


@pytest.mark.usefixtures("long_stop")
def test_a_worker_gives_up_without_the_store() -> None:
    store = Silent()
    with cluster(2, store=store, graceful=False) as group:
        store.answers.clear()
        start = time.monotonic()
        try:
            with pytest.raises(ShutdownTimeout, match=r"gave up after 0\.3 s; still missing: w1"):
                run_all([lambda: group[0].shutdown(timeout=SOON)], timeout=END)
            assert time.monotonic() - start < LATEST
        finally:
            store.answers.set()


def test_a_graceful_shutdown_without_a_limit_does_not_wait_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is lost, so this one asks the store for others that have given up."""
    monkeypatch.setattr(shutdown_barrier, "_STORE_TIMEOUT", SOON)
    store = Silent()
    with cluster(3, store=store, graceful=False) as group:
        for worker in list(group)[:2]:
            assert worker.rpc_sync("w2", abs, (-1,)) == 1
        group[2].shutdown(graceful=False)
        eventually(lambda: all(2 in worker._worker.members.lost for worker in list(group)[:2]))
        store.answers.clear()
        try:
            run_all([worker.shutdown for worker in list(group)[:2]], timeout=END)
        finally:
            store.answers.set()


def test_a_member_leaves_without_a_limit_and_without_the_store(caplog: pytest.LogCaptureFixture) -> None:
    store = Silent()
    worker = Worker("w0", options=Options(member_lease=SOON), store=store)  # type: ignore[arg-type]
    store.answers.clear()
    try:
        run_all([worker.shutdown], timeout=END)
    finally:
        store.answers.set()
    assert "w0 leaves its group without the store" in caplog.text


def test_waits_for_others_end_while_the_store_is_silent() -> None:
    store = Silent()
    with cluster(2, Options(member_lease=1.0), store=store, dynamic=True) as group:
        rpc.register_service("known", 5)
        store.answers.clear()
        eventually(lambda: store.waiting)  # the thread that renews the lease
        begun = time.monotonic()
        try:
            with pytest.raises(RpcTimeout, match=r"wait for worker w5; the store .* not reply.* Check the host"):
                rpc.wait_for_worker("w5", timeout=SOON)
            with pytest.raises(RpcTimeout, match=r"service known; .* has not replied within .* Check the host"):
                rpc.get_service("known", timeout=SOON)
            with pytest.raises(StoreUnresponsive, match=r"has not replied within"):
                rpc.register_service("more", 5, timeout=SOON)
            with pytest.raises(UnknownWorker):
                rpc.rpc_sync("w5", abs, (-1,))
            assert group[0].rpc_sync("w1", abs, (-1,)) == 1
        finally:
            store.answers.set()
        assert time.monotonic() - begun < END
        assert rpc.get_service("known", timeout=END).to_here() == 5


def test_a_wait_for_a_service_blocks_one_thread_while_the_store_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_MOST", 0.02)
    store = Silent()
    reads: list[int] = []  # that have not ended, after each attempt to read
    result = Operation.result

    def counted(self: Operation[Any], seconds: float) -> Any:
        try:
            return result(self, seconds)
        finally:
            reads.append(sum(thread.name == "telegrad-store-use" for thread in threading.enumerate()))

    with cluster(1, store=store, dynamic=True):
        rpc.register_service("known", 5)
        monkeypatch.setattr(Operation, "result", counted)
        store.answers.clear()
        try:
            with pytest.raises(RpcTimeout, match="wait for the service known"):
                rpc.get_service("known", timeout=SOON)
        finally:
            store.answers.set()
        assert len(reads) > 2
        assert max(reads) == 1
        assert rpc.get_service("known", timeout=END).to_here() == 5


@pytest.mark.parametrize("error", [dist.DistStoreError, StoreUnresponsive])
def test_a_silent_store_is_logged_once(error: type[RuntimeError], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "telegrad")
    store = Silent()
    store.error = error
    with cluster(1, Options(member_lease=0.4), store=store, dynamic=True):
        store.fails = True
        failures = store.failures
        eventually(lambda: store.failures > failures + 5)
        store.fails = False
        eventually(lambda: "the store of the group of worker w0 replies again" in caplog.text)
    assert caplog.text.count("worker w0 gets no reply from the store of its group: wait timeout") == 1


def test_shutdown_does_not_wait_for_the_store() -> None:
    store = Silent()
    store.answers.clear()
    try:
        assert not rendezvous.is_abandoned(C10dStore(store), SOON)  # type: ignore[arg-type]
        rendezvous.mark_abandoned(C10dStore(store), SOON)  # type: ignore[arg-type]
    finally:
        store.answers.set()


def test_operations_with_a_timeout() -> None:
    def fails() -> None:
        raise KeyError("as it is")

    assert within(END, lambda: 5) == within(0, lambda: 5) == 5
    for seconds in (0, END):
        with pytest.raises(KeyError, match="as it is"):
            within(seconds, fails)
    never = threading.Event()
    with pytest.raises(StoreUnresponsive, match=r"has not replied within 0\.01 s"):
        within(0.01, never.wait)
    never.set()


def test_limited_store_is_the_store() -> None:
    store = BoundedStore(dist.HashStore(), lambda: END)  # type: ignore[attr-defined]
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.timeout == timedelta(minutes=5)
