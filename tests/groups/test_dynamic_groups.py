"""Groups without ranks and world size: the life of their store, leaving members."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from free_ports import free_port
from process_helpers import TIMEOUT, Actor, actors, call_many

from telegrad import rpc
from telegrad.errors import UnknownWorker
from telegrad.group import hosting, rendezvous, stores
from telegrad.rpc import Options
from telegrad.testing import Gate, cluster, run_all
from telegrad.worker.membership.shutdown_barrier import GracefulShutdown

# ---- steps


def set_address(port: int) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def join(name: str, where: str) -> int:
    rpc.init_rpc(name, rpc_backend_options=Options(init_method=where, rpc_timeout=TIMEOUT))
    return rpc.get_worker_info().id


def leave() -> None:
    rpc.shutdown(timeout=TIMEOUT)


def stop_waiting() -> None:
    with pytest.raises(UnknownWorker):
        rpc.get_worker_info("unknown")


def process_group_alongside(name: str) -> None:
    """Join, and create a process group on the port of the store."""
    rpc.init_rpc(name)
    dist.init_process_group("gloo", rank=0, world_size=1)
    dist.barrier()
    dist.destroy_process_group()
    assert rpc.rpc_sync(name, abs, (-1,)) == 1
    leave()


def call_each_other(group: list[Actor]) -> None:
    for actor in group:
        for other in group:
            assert actor.do(call_many, other.name, 2) == 2


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, method="none") as group:
        yield group


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_concurrent_joins_repeatedly(three: list[Actor], tmp_path: Path, scheme: str) -> None:
    port = free_port()
    for actor in three:
        actor.do(set_address, port)
    where = {"tcp": f"tcp://localhost:{port}", "file": f"file://{tmp_path}/meeting", "env": "env://"}[scheme]
    for _ in range(2):
        steps = [actor.begin(join, actor.name, where) for actor in three]
        assert sorted(step.result() for step in steps) == [0, 1, 2]
        call_each_other(three)
        for actor in three:  # also the host's worker: its store stays
            actor.do(leave)


def test_members_continue_without_the_host(three: list[Actor]) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    for actor in three:
        actor.do(join, actor.name, where)
    call_each_other(three)
    three[0].end()
    call_each_other(three[1:])
    three[1].do(stop_waiting)
    three[1].do(leave)
    assert three[2].do(call_many, "w2", 2) == 2
    three[2].do(leave)
    assert "leaves its group without the store" in three[1].stderr()


def test_a_process_group_shares_the_port(three: list[Actor]) -> None:
    three[0].do(set_address, free_port())
    three[0].do(process_group_alongside, "w0")


@pytest.mark.parametrize("where", ["tcp://127.0.0.1:1", "file:///no/such/folder/x", "env://"])
def test_a_world_size_needs_a_rank(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"rank parameter missing|environment variable RANK expected"):
        rpc.init_rpc("a", world_size=2, rpc_backend_options=Options(init_method=where))


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("tcp://127.0.0.1", "lacks a host or a port"),
        ("tcp://:80", "lacks a host or a port"),
        ("file://", "names no file"),
        ("env://", "environment variable MASTER_ADDR expected"),
    ],
)
def test_incomplete_address(where: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=text):
        rpc.init_rpc("a", rpc_backend_options=Options(init_method=where))


@pytest.mark.parametrize("query", ["rank=0&world_size=1", "rank=0", "world_size=1"])
@pytest.mark.parametrize(("rank", "world_size"), [(-1, None), (0, None), (0, 1)])
def test_address_with_a_rank_or_a_world_size(tmp_path: Path, query: str, rank: int, world_size: int | None) -> None:
    options = Options(init_method=f"file://{tmp_path}/meeting?{query}")
    with pytest.raises(ValueError, match="Give them as the arguments rank and world_size"):
        rpc.Worker("w", rank, world_size, options)


def test_listening_addresses() -> None:
    """Listen only at local addresses, on loopback if so named, and once per port."""
    assert hosting.listen("192.0.2.1", 0) is None
    with hosting.listen("127.0.0.1", 0) as first:  # type: ignore[union-attr]
        host, port = first.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(hosting.PortInUse):
            hosting.listen("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(hosting.PortInUse):
        hosting.listen("127.0.0.1", port)


def test_the_host_of_the_store_ends_during_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    host = [dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)]  # type: ignore[attr-defined]
    agree = rendezvous.agree

    def agree_without_host(*arguments: Any) -> Any:
        host.clear()
        return agree(*arguments)

    monkeypatch.setattr(rendezvous, "agree", agree_without_host)
    text = (
        rf"worker b could not join its group, because the connection to the group's store at 127.0.0.1:{port} failed:"
        r" .+\. The process that hosts the store has ended, .* Start this worker again"
    )
    with pytest.raises(rendezvous.StoreGone, match=text):
        rpc.Worker("b", options=Options(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=30))


def test_torchruns_agent_hosts_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert stores._agent_hosts("127.0.0.1", 29500)
    assert not stores._agent_hosts("127.0.0.1", 29501)


@pytest.mark.parametrize("where", ["tcp://127.0.0.1:1", "file:///nowhere/file"])
def test_torchs_own_options_need_a_rank_as_in_torch(where: str) -> None:
    with pytest.raises(ValueError, match="rank parameter missing"):
        rpc.init_rpc("w", rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=where))


# ---- leaving


def test_without_a_timeout_a_worker_waits_for_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    drain = GracefulShutdown.drain

    def recorded(self: GracefulShutdown, limit: float) -> bool:
        limits.append(limit)
        return drain(self, limit)

    monkeypatch.setattr(GracefulShutdown, "drain", recorded)
    with cluster(2, dynamic=True, graceful=False) as w:
        gate = Gate()
        call = w[1].rpc_async("w0", gate.enter, ("done",))
        gate.wait_for()
        run_all([w[1].shutdown, gate.open])
        assert (limits, call.wait()) == ([0], "done")
