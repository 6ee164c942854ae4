"""Groups whose workers reach the store over the Unix socket, one after the other."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from free_ports import free_port
from process_helpers import TIMEOUT, Actor, actors, call_many, join, shut_all_down, state

from telegrad import rpc
from telegrad.group import hosting, probing, stores
from telegrad.group.rendezvous import StoreGone
from telegrad.group.unix_store import LocalStore, request_release
from telegrad.rpc import Options
from telegrad.testing import eventually
from telegrad.waits import Wait

LONG = timedelta(seconds=TIMEOUT)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, method="none") as group:
        yield group


def kind_of_store() -> str:
    store = rpc.api._get_current_rpc_agent().worker.store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return type(store).__name__


def join_as_torchs_host(name: str, port: int, size: int) -> None:
    """Join as rank 0 with the program's own store, which has no server."""
    state["store"] = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    rpc.init_rpc(name, rank=0, world_size=size, store=state["store"])


def join_all(group: list[Actor], where: str) -> None:
    for step in [actor.begin(join, actor.name, actor.rank, len(group), where, {}) for actor in group]:
        step.result()
    for actor in group:
        assert actor.do(call_many, group[0].name, 2) == 2


def test_workers_of_one_host_use_the_socket(three: list[Actor]) -> None:
    join_all(three, f"tcp://localhost:{free_port()}")
    assert [actor.do(kind_of_store) for actor in three] == ["LocalStore"] * 3
    shut_all_down(three)


def test_without_a_socket_they_use_the_port(three: list[Actor]) -> None:
    port = free_port()
    steps = [actor.begin(join, actor.name, actor.rank, 3, f"tcp://127.0.0.1:{port}", {}) for actor in three[1:]]
    steps.append(three[0].begin(join_as_torchs_host, "w0", port, 3))
    for step in steps:
        step.result()
    assert [actor.do(kind_of_store) for actor in three] == ["TCPStore"] * 3
    shut_all_down(three)


def fork_idle_children(count: int) -> None:
    """Fork children that stay idle while the parent lives, as an open DataLoader's do."""
    end, held = os.pipe()
    state["held"] = held
    for _ in range(count):
        if os.fork() == 0:
            os.close(held)
            os.read(end, 1)
            os._exit(0)


def end_forks() -> None:
    os.close(state.pop("held"))
    for _ in range(2):
        os.wait()


def test_children_of_the_host_do_not_keep_its_socket(three: list[Actor]) -> None:
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    join_all(three[:2], where)
    three[0].do(fork_idle_children, 2)
    shut_all_down(three[:2])
    join_all(three[:2], f"tcp://127.0.0.1:{free_port()}")  # closes the first store
    with pytest.raises(ConnectionRefusedError):
        LocalStore("localhost", port, LONG)
    shut_all_down(three[:2])
    three[0].do(end_forks)


def has(port: int, key: str) -> bool:
    """Return whether a server's store has the key."""
    try:
        return LocalStore("localhost", port, LONG).check([key])
    except (OSError, StoreGone):
        return False


def test_another_process_hosts_the_next_group(three: list[Actor]) -> None:
    """A worker of the next group finds the previous store; the new host joins last."""
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    join_all(three, where)
    shut_all_down(three)
    guest = three[2].begin(join, "w2", 2, 3, where, {})
    eventually(lambda: has(port, "rpc_prefix_1/member/2"), TIMEOUT)
    host = three[1].begin(join, "w0", 0, 3, where, {})
    eventually(lambda: host.is_over or has(port, "rpc_prefix_1/member/0"), TIMEOUT)
    for step in (host, guest, three[0].begin(join, "w1", 1, 3, where, {})):
        step.result()
    for actor in three:
        assert actor.do(call_many, "w0", 2) == 2
    shut_all_down(three)


@pytest.mark.parametrize("options", [{}, {"secret": "a secret of the group"}], ids=["", "secret"])
@pytest.mark.parametrize("next_host", [0, 3], ids=["the process that has the store", "another process"])
def test_a_new_process_finds_the_store_of_a_group_that_has_ended(
    tmp_path: Path, next_host: int, options: dict[str, Any]
) -> None:
    """Rank 0 of the next group, in the same process or another one, joins after it."""
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    with actors(4, tmp_path, method="none") as group:
        for _ in range(2):  # two groups, so that the new process has joined fewer than the host
            before = [group[rank].begin(join, f"w{rank}", rank, 2, where, options) for rank in (0, 1)]
            for step in before:
                step.result()
            shut_all_down(group[:2])
        guest = group[2].begin(join, "w1", 1, 2, where, options)
        eventually(lambda: guest.is_over or has(port, "rpc_prefix_2/member/1"), TIMEOUT)
        group[next_host].do(join, "w0", 0, 2, where, options)
        guest.result()
        assert group[next_host].do(call_many, "w1", 2) == group[2].do(call_many, "w0", 2) == 2
        shut_all_down([group[next_host], group[2]])


def test_an_unused_store_makes_room_for_the_next() -> None:
    port = free_port()
    store = hosting.host_for_worker(hosting.StoreAddress("127.0.0.1", port, 0, True), LONG)
    request_release(port)
    store.set("key", "1")
    assert has(port, "key")
    del store
    assert has(port, "key")
    request_release(port)
    eventually(lambda: "refused" in probing.probe("127.0.0.1", port, TIMEOUT))
    request_release(port)


def test_a_store_that_closes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 finds the port taken, and asks who has it when it is free again."""
    port = free_port()
    closing = [dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)]  # type: ignore[attr-defined]

    def probe_after_its_end(*where: Any) -> str:
        closing.clear()
        return probing.probe(*where)

    monkeypatch.setattr(hosting, "probe", probe_after_its_end)
    store = hosting.host_for_worker(hosting.StoreAddress("127.0.0.1", port, 0, True), LONG)
    assert not closing
    store.set("key", "1")
    assert has(port, "key")
    del store
    hosting.latest.clear()


def test_one_process_may_be_server_and_client() -> None:
    port = free_port()
    store = hosting.host_for_worker(hosting.StoreAddress("127.0.0.1", port, 0, True), LONG)
    again = stores._connect_as_client(
        hosting.StoreAddress("127.0.0.1", port, 1, True), True, Wait("w1 (rank 1)", TIMEOUT)
    )
    store.set("key", "1")
    assert again.get("key") == b"1"
    del store, again
    hosting.latest.clear()
    with pytest.raises(ConnectionRefusedError):
        LocalStore("localhost", port, LONG)


def test_missing_host() -> None:
    options = Options(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=0.1)
    with pytest.raises(RuntimeError, match=r"no store at 127.0.0.1:\d+ within 0.1 s: rank 0, which hosts it, did not"):
        rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=options)
