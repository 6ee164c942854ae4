"""Rendezvous at every kind of store, alongside process groups, and repeatedly."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from free_ports import free_port
from process_helpers import TIMEOUT, Actor, actors, call, call_many, join, shut_all_down, state

from telegrad import rpc
from telegrad.rpc import Options, Worker
from telegrad.testing import cluster, eventually

# ---- steps


def leave() -> None:
    rpc.shutdown(timeout=TIMEOUT)


def environment(rank: int, size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))


def join_by_environment(name: str) -> None:
    rpc.init_rpc(name)


def join_with_ranks(name: str, rank: int, size: int) -> None:
    rpc.init_rpc(name, rank=rank, world_size=size)


def store_of(path: str, size: int) -> Any:
    return state.setdefault("store", dist.FileStore(path, size))


def join_store(name: str, rank: int, size: int | None, path: str, count: int) -> tuple[str, int]:
    rpc.init_rpc(name, rank=rank, world_size=size, store=store_of(path, count))
    info = rpc.get_worker_info()
    return info.name, info.id


def begin_process_group(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size)


def all_reduce(rank: int) -> float:
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    return float(tensor)


def call_and_reduce(rank: int, to: str) -> tuple[int, float]:
    """Make remote calls while the process group works."""
    calls = [rpc.rpc_async(to, abs, (-i,), timeout=TIMEOUT) for i in range(50)]
    total = all_reduce(rank)
    return sum(call.wait() == i for i, call in enumerate(calls)), total


def end_process_group() -> None:
    dist.destroy_process_group()


def names() -> list[str]:
    return [info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos()]


def on_all(group: list[Actor], function: Any, *args: Any) -> list[Any]:
    """Run a step on all processes at once; the argument "rank" is replaced."""
    steps = [actor.begin(function, *[actor.rank if a == "rank" else a for a in args]) for actor in group]
    return [step.result() for step in steps]


def call_each_other(group: list[Actor]) -> None:
    for actor in group:
        for other in group:
            assert actor.do(call_many, other.name, 2) == 2


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Actor]]:
    """Three processes that have not joined yet."""
    with actors(3, tmp_path, method="none") as group:
        yield group


def test_ranks_from_the_environment(three: list[Actor]) -> None:
    port = free_port()
    on_all(three, environment, "rank", 3, port)
    steps = [actor.begin(join_by_environment, actor.name) for actor in three]
    for step in steps:
        step.result()
    call_each_other(three)
    shut_all_down(three)


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_repeatedly_at_one_address(three: list[Actor], tmp_path: Path, scheme: str) -> None:
    port = free_port()
    on_all(three, environment, "rank", 3, port)
    where = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meeting", "env": "env://"}[scheme]
    for _ in range(4):
        steps = [actor.begin(join, actor.name, actor.rank, 3, where, {}) for actor in three]
        for step in steps:
            step.result()
        call_each_other(three)
        shut_all_down(three)


def test_repeatedly_with_other_names_and_ranks(three: list[Actor], tmp_path: Path) -> None:
    for turn in range(3):
        for actor in three:
            actor.name = f"turn{turn}-{actor.rank}"
        where = f"file://{tmp_path}/meeting"
        steps = [actor.begin(join, actor.name, (actor.rank + turn) % 3, 3, where, {}) for actor in three]
        for step in steps:
            step.result()
        call_each_other(three)
        shut_all_down(three)


def test_after_a_worker_has_died(three: list[Actor], tmp_path: Path) -> None:
    """The survivors form a group without the lost worker."""
    steps = [a.begin(join, a.name, a.rank, 3, f"file://{tmp_path}/meeting", {}) for a in three]
    for step in steps:
        step.result()
    call_each_other(three)
    three[2].end()
    shut_all_down(three[:2])
    steps = [a.begin(join, a.name, a.rank, 2, f"file://{tmp_path}/meeting", {}) for a in three[:2]]
    for step in steps:
        step.result()
    call_each_other(three[:2])
    assert three[0].do(names) == ["w0", "w1"]
    shut_all_down(three[:2])


def test_at_a_given_store(three: list[Actor], tmp_path: Path) -> None:
    path = str(tmp_path / "given")
    for _ in range(3):
        steps = [actor.begin(join_store, actor.name, actor.rank, 3, path, 3) for actor in three]
        assert [step.result() for step in steps] == [("w0", 0), ("w1", 1), ("w2", 2)]
        call_each_other(three)
        shut_all_down(three)


@pytest.mark.parametrize("first", ["process group", "rpc"])
def test_alongside_a_process_group_on_one_port(three: list[Actor], first: str) -> None:
    """Both share MASTER_PORT, in either order, and work at the same time."""
    port = free_port()
    on_all(three, environment, "rank", 3, port)
    if first == "process group":
        on_all(three, begin_process_group, "rank", 3)
    steps = [actor.begin(join_with_ranks, actor.name, actor.rank, 3) for actor in three]
    for step in steps:
        step.result()
    if first == "rpc":
        on_all(three, begin_process_group, "rank", 3)
    steps = [actor.begin(call_and_reduce, actor.rank, f"w{(actor.rank + 1) % 3}") for actor in three]
    assert [step.result() for step in steps] == [(50, 6.0)] * 3
    if first == "process group":
        shut_all_down(three)
        on_all(three, end_process_group)
    else:
        on_all(three, end_process_group)
        shut_all_down(three)


# ---- dynamic groups


def join_dynamic(name: str, path: str, rank: int = -1) -> int:
    rpc.init_rpc(name, rank=rank, store=store_of(path, -1), rpc_backend_options=Options(rpc_timeout=TIMEOUT))
    return rpc.get_worker_info().id


def join_dynamic_at(name: str, rank: int, where: str) -> None:
    rpc.init_rpc(name, rank=rank, rpc_backend_options=Options(init_method=where, rpc_timeout=TIMEOUT))


def test_dynamic_group_with_joins_and_leaves(three: list[Actor], tmp_path: Path) -> None:
    path = str(tmp_path / "given")
    for actor in three:
        assert actor.do(join_dynamic, actor.name, path) == actor.rank
        call_each_other(three[: actor.rank + 1])  # the new worker with the earlier ones, in both directions
    three[1].do(leave)
    call_each_other([three[0], three[2]])
    assert three[0].do(names) == ["w0", "w2"]
    assert three[1].do(join_dynamic, "w1", path) == 1, "the free rank"
    call_each_other(three)
    three[0].do(leave)
    assert three[0].do(join_dynamic, "w0", path, 7) == 7
    call_each_other(three)
    assert three[1].do(names) == ["w1", "w2", "w0"]
    for actor in three:
        actor.do(leave)
    assert [actor.stderr() for actor in three] == [""] * 3


def test_dynamic_group_with_concurrent_joins_and_leaves(three: list[Actor], tmp_path: Path) -> None:
    path = str(tmp_path / "given")
    for _ in range(3):
        steps = [actor.begin(join_dynamic, actor.name, path) for actor in three]
        assert sorted(step.result() for step in steps) == [0, 1, 2]
        call_each_other(three)
        on_all(three, leave)


def test_dynamic_group_by_address(three: list[Actor]) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    for actor in three:
        actor.do(join_dynamic_at, actor.name, actor.rank, where)
    call_each_other(three)
    for actor in reversed(three):
        actor.do(leave)


def test_dynamic_group_replaces_a_dead_worker(three: list[Actor], tmp_path: Path) -> None:
    """The other workers call the replacement of a dead worker as before."""
    path = str(tmp_path / "given")
    for actor in three[:2]:
        actor.do(join_dynamic, actor.name, path)
    call_each_other(three[:2])
    three[1].end()
    three[2].name = "w1"
    assert three[2].do(join_dynamic, "w1", path) == 1
    call_each_other([three[0], three[2]])
    three[2].do(leave)
    three[0].do(leave)


def test_calls_in_a_dynamic_group_end_before_a_member_leaves(three: list[Actor], tmp_path: Path) -> None:
    path = str(tmp_path / "given")
    for actor in three:
        actor.do(join_dynamic, actor.name, path)
    slow = three[0].begin(call, "w1", call, "w2", call_many, "w1", 300)
    quick = three[2].begin(call_many, "w1", 300)
    for step in (slow, quick):
        assert step.result() == 300
    three[1].do(leave)
    assert three[0].do(names) == ["w0", "w2"]
    for actor in (three[0], three[2]):
        actor.do(leave)


class CountingStore:
    """Counts the operations of a group on its store."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self.uses = 0

    def __getattr__(self, name: str) -> Any:
        self.uses += callable(getattr(self.store, name))
        return getattr(self.store, name)


def test_store_operations_are_linear_in_the_group_size() -> None:
    uses = {}
    for size in (4, 8, 16):
        store = CountingStore()
        with cluster(size, store=store):
            uses[size] = store.uses
    each = [uses[size] / size for size in uses]
    assert max(each) < min(each) + 2  # any number of members may be the first to agree


def test_a_process_hosts_no_store_of_a_dynamic_group_that_has_ended() -> None:
    """The port of a group with members stays open."""
    ports = [free_port() for _ in range(3)]
    first, lasting = (Worker("w", options=Options(init_method=f"tcp://127.0.0.1:{port}")) for port in ports[:2])
    first.shutdown()
    third = Worker("w", options=Options(init_method=f"tcp://127.0.0.1:{ports[2]}"))
    eventually(lambda: not is_open(ports[0]))
    assert is_open(ports[1])
    assert is_open(ports[2])
    for worker in (lasting, third):
        worker.shutdown()
    assert is_open(ports[2])  # the next worker of the group may need it


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
