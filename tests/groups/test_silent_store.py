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

from telegrad.errors import ShutdownTimeout
from telegrad.group import rendezvous
from telegrad.group.store_waits import BoundedStore, StoreUnresponsive, within
from telegrad.rpc import Worker
from telegrad.testing import cluster, run_all

SOON = 0.3  # s
END = 10.0  # s


def host_store(port: int) -> None:
    state["store"] = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def test_a_member_leaves_while_the_stores_host_is_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with actors(1, tmp_path, method="none") as (host,):
        host.do(host_store, port)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT))  # type: ignore[attr-defined]
        worker = Worker("w0", store=store)
        host.stop()
        start = time.monotonic()
        run_all([lambda: worker.shutdown(timeout=SOON)], timeout=END)
        assert time.monotonic() - start < END
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

    def __getattr__(self, name: str) -> Any:
        self.answers.wait()
        return getattr(self.store, name)


def test_a_worker_gives_up_without_the_store() -> None:
    store = Silent()
    with cluster(2, store=store, graceful=False) as group:
        store.answers.clear()
        try:
            with pytest.raises(ShutdownTimeout, match=r"gave up after 0\.3 s; still missing: w1"):
                run_all([lambda: group[0].shutdown(timeout=SOON)], timeout=END)
        finally:
            store.answers.set()


def test_shutdown_does_not_wait_for_the_store() -> None:
    store = Silent()
    store.answers.clear()
    try:
        assert not rendezvous.is_abandoned(store, SOON)
        rendezvous.mark_abandoned(store, SOON)
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
