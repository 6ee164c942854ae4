"""Several workers of one process that join at one address."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from process_helpers import actors

from telegrad.errors import TelegradError
from telegrad.group import hosting, stores
from telegrad.group.store_parts import _Numbers, _numbers
from telegrad.rpc import Options, Worker
from telegrad.testing import run_all


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_workers_of_one_process_join(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    where = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meeting", "env": "env://"}[scheme]
    options = Options(init_method=where, rpc_timeout=30)
    for turn in range(2):
        workers = run_all(
            [lambda rank=rank: Worker(f"w{rank}", (rank + turn) % 3, 3, options) for rank in range(3)]  # type: ignore[misc] # noqa: B023
        )
        assert workers[0].rpc_sync("w2", abs, (-1,)) == 1
        run_all([lambda worker=worker: worker.shutdown(timeout=30) for worker in workers])  # type: ignore[misc]


@pytest.mark.parametrize("by_port", [False, True])
def test_a_client_at_the_store_of_the_previous_group(by_port: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store closes while the client joins; it then joins its own group's store."""
    port = free_port()
    options = Options(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=30)
    if by_port:
        monkeypatch.setattr(stores, "_is_local", lambda *_: False)
    before: list[Any] = [
        hosting.host_for_worker(hosting.StoreAddress("127.0.0.1", port, 0, True), timedelta(seconds=30))
    ]

    def host_the_next_one() -> Worker:
        before[0].wait(["rpc_prefix_0/member/1"])
        before.clear()
        return Worker("w0", 0, 2, options)

    workers = run_all([host_the_next_one, lambda: Worker("w1", 1, 2, options)])
    assert workers[0].rpc_sync("w1", abs, (-1,)) == 1
    assert _numbers.next(options.init_method) == 1
    run_all([lambda worker=worker: worker.shutdown(timeout=30) for worker in workers])  # type: ignore[misc]


def test_a_client_of_a_store_that_closes() -> None:
    port = free_port()
    before: list[Any] = [
        hosting.host_for_worker(hosting.StoreAddress("127.0.0.1", port, 0, True), timedelta(seconds=30))
    ]

    def end() -> None:
        before[0].wait(["rpc_prefix_0/member/1"])
        before.clear()

    def join() -> None:
        with pytest.raises(
            RuntimeError, match=r"no store at .*: rank 0, which hosts it, did not start in time"
        ) as failed:
            Worker("w1", 1, 2, Options(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=0.5))
        assert "the host of the group's store closed the connection" in str(failed.value.__cause__)

    run_all([end, join])


def test_a_rank_used_twice(tmp_path: Path) -> None:
    """The second one belongs to the next group, which no other worker joins."""
    options = Options(init_method=f"file://{tmp_path}/meeting", rpc_timeout=0.3)

    def join() -> None:
        with pytest.raises(TelegradError, match=r"rank 1 of 2 did not join"):
            Worker("w", 0, 2, options)

    run_all([join, join])


def test_group_numbers() -> None:
    numbers = _Numbers()
    with numbers.joining("here", "store", 2, 0) as first, numbers.joining("here", "store", 2, 1) as same:
        assert first == same == 0
        with numbers.joining("here", "store", 2, 1) as again, numbers.joining("here", "other", 2, 1) as elsewhere:
            assert (again, elsewhere) == (1, 2)
    with numbers.joining("here", "store", 2, 1) as following:
        assert following == 3
    with numbers.joining("there", "store", 2, 1) as of_another_place:
        assert of_another_place == 0


def test_a_process_that_has_joined_groups_elsewhere_meets_a_new_one(tmp_path: Path) -> None:
    """A driver starts a worker for each group, at an address of its own."""
    for number in range(2):
        options = Options(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=30)
        with actors(1, tmp_path, method="none") as (other,):
            step = other.begin(join_as_second, options.init_method)
            driver = Worker("w0", 0, 2, options)
            assert driver.rpc_sync("w1", abs, (-number,)) == number
            run_all([lambda driver=driver: driver.shutdown(timeout=30), step.result])  # type: ignore[misc]


def join_as_second(where: str) -> None:
    worker = Worker("w1", 1, 2, Options(init_method=where, rpc_timeout=30))
    worker.shutdown(timeout=30)
