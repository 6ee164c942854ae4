"""Access to a group's store, and its secrets."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from free_ports import free_port

from telegrad import rpc
from telegrad.errors import TelegradError, UnknownWorker
from telegrad.group import hosting, rendezvous, stores
from telegrad.group import log as group_log
from telegrad.group.group_store import C10dStore, log_key
from telegrad.group.lease import lease_key
from telegrad.group.log import GroupLog
from telegrad.group.records import Group, Member, member_key, member_of, record_of, sealed, seat_of, unsealed
from telegrad.protocols.membership import Join, Joined, Leave
from telegrad.rpc import Options, Worker
from telegrad.testing import Cluster, cluster, eventually, run_all

GIVEN = Options(secret="correct horse battery staple", rpc_timeout=30)
LONG = timedelta(seconds=30)


def listening(port: int) -> list[str]:
    """Return the addresses at which this machine listens on a port, from the kernel."""
    found = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            host, _, its_port = fields[1].rpartition(":")
            if fields[3] == "0A" and int(its_port, 16) == port:
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


@pytest.fixture
def own_address() -> Iterator[str]:
    """Return an address of this machine that other machines can use."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route but loopback")
        yield s.getsockname()[0]


@pytest.fixture
def forget() -> Iterator[None]:
    yield
    hosting.latest.clear()


def host(address: str, port: int) -> Any:
    return stores.meet("w0", Options(init_method=f"tcp://{address}:{port}"), 0, 1)[0]


@pytest.mark.parametrize(("asked", "bound"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("[::1]", "::1")])
def test_store_on_loopback_listens_only_there(forget: None, asked: str, bound: str) -> None:
    if bound == "::1" and not hosting.is_own(socket.AF_INET6, ("::1", 0, 0, 0)):
        pytest.skip("this machine has no IPv6")
    port = free_port()
    store = host(asked, port)
    assert listening(port) == [bound]
    store.set("key", "value")
    client = dist.TCPStore(bound, port, is_master=False, wait_for_workers=False, timeout=LONG)  # type: ignore[attr-defined]
    assert client.get("key") == b"value"


def test_store_listens_at_its_address_only(forget: None, own_address: str) -> None:
    port = free_port()
    _store = host(own_address, port)
    assert listening(port) == [own_address]


@pytest.mark.parametrize("asked", ["0.0.0.0", socket.gethostname()])
def test_store_listens_at_all_addresses_on_request(forget: None, asked: str) -> None:
    port = free_port()
    _store = host(asked, port)
    assert listening(port) in (["::"], ["0.0.0.0"])


def test_a_port_that_becomes_free_is_opened_at_its_address_only(forget: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of another group closes just after rank 0 has found the port taken."""
    port = free_port()
    others = [socket.create_server(("127.0.0.1", port))]
    listen = hosting.listen

    def free_afterwards(*where: Any) -> Any:
        try:
            return listen(*where)
        finally:
            while others:
                others.pop().close()

    monkeypatch.setattr(hosting, "listen", free_afterwards)
    store = host("127.0.0.1", port)
    assert listening(port) == ["127.0.0.1"]
    store.set("key", "value")


def test_rank_0_shares_the_store_of_its_process_group(forget: None) -> None:
    port = free_port()
    of_group = dist.TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True, wait_for_workers=False)  # type: ignore[attr-defined]
    before = os.listdir("/proc/self/fd")
    assert hosting._listens_itself(port)
    assert not hosting._listens_itself(free_port())
    assert os.listdir("/proc/self/fd") == before
    host("127.0.0.1", port).set("key", "value")
    assert of_group.get("key") == b"value"


def test_rank_0_at_an_address_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's store listens on all addresses: a router may forward the other one."""

    def time_out(*where: Any, **given: Any) -> Any:
        assert given["master_listen_fd"] is None
        raise dist.DistNetworkError("timed out")

    monkeypatch.setattr(hosting, "TCPStore", time_out)
    port = free_port()
    with pytest.raises(TelegradError, match=rf"cannot reach it at 192.0.2.7:{port}, .*: timed out. Give MASTER_ADDR"):
        host("192.0.2.7", port)
    assert f"listens on all addresses of its machine for the group's store, at port {port}: 192.0.2.7" in caplog.text


def test_file_is_private_to_its_user(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    before = os.umask(0)
    try:
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=Options(init_method=f"file://{path}"))
        assert path.stat().st_mode & 0o777 == 0o600
        rpc.shutdown()
    finally:
        os.umask(before)


def test_an_existing_file_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    path.touch()
    path.chmod(0o666)
    rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=Options(init_method=f"file://{path}"))
    assert path.stat().st_mode & 0o777 == 0o600
    rpc.shutdown()


def test_file_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "meeting"
    path.touch()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match=r"the file belongs to another user \(uid \d+\).* Remove it"):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=Options(init_method=f"file://{path}"))


def test_link_to_a_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match="the group cannot meet at"):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=Options(init_method=f"file://{path}"))


def test_file_that_cannot_be_created() -> None:
    where = "file:///no/such/folder/file"
    with pytest.raises(RuntimeError, match=f"the group cannot meet at {where}: No such file or directory"):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=Options(init_method=where))


def test_random_secret_is_removed_once_all_have_joined(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    store = dist.FileStore(str(path), 2)  # type: ignore[attr-defined]
    secret = ""
    written = path.read_bytes

    def read_store_while_joining() -> None:
        nonlocal secret
        store.wait(["member/1"], LONG)
        secret = json.loads(store.get("agreement"))["key"]
        assert secret.encode() in written()

    joined: list[Worker] = []
    early = threading.Thread(target=lambda: joined.append(Worker("w1", 1, 2, store=store)))
    early.start()
    read_store_while_joining()
    joined.append(Worker("w0", 0, 2, store=store))
    early.join(30)
    assert len(secret) == 64
    assert secret.encode() not in written()
    assert json.loads(store.get("agreement"))["key"] == ""
    assert secret == joined[0]._worker.group.secret.hex()
    assert rendezvous.is_static(store)
    with joined[0]:
        assert rpc.rpc_sync("w0", abs, (-1,)) == 1
    run_all([lambda worker=worker: worker.shutdown(timeout=30) for worker in joined])  # type: ignore[misc]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.openssl
def test_secret_that_was_given_never_enters_the_store(tmp_path: Path, dynamic: bool) -> None:
    path = tmp_path / "meeting"
    with cluster(2, GIVEN, store=dist.FileStore(str(path), -1), dynamic=dynamic) as group:  # type: ignore[attr-defined]
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1
        written = path.read_bytes()
        assert group[0]._worker.group.secret not in written
        assert group[0]._worker.group.secret.hex().encode() not in written


def test_group_does_not_show_its_secret() -> None:
    group = Group("token", b"horse", False)
    assert repr(group) == str(group) == "Group(token='token', shared_secret=False)"
    with cluster(1) as alone:
        assert alone[0]._worker.group.secret.hex() not in repr(alone[0]._worker.group)


# ---- records

ME = Member(1, "w1", 77, ["tcp:10.0.0.1:5"], "boot/1", (0, ["cuda:0"], {"w0": {"cuda:0": "cuda:0"}}))
GROUP = Group("token", b"horse", False)


def through_store(record: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(record))
    return read


@pytest.mark.parametrize("group", [GROUP, GROUP._replace(shared_secret=True)])
def test_records_survive_the_round_trip(group: Group) -> None:
    back = member_of(ME.id, through_store(record_of(ME, group)), group)
    assert back == ME._replace(devices=list(ME.devices))


@pytest.mark.parametrize(
    "forged",
    [
        {"facts": [1, "w1", 77, ["tcp:10.6.6.6:5"], *ME[4:]]},
        {"facts": [0, *ME[1:]]},
        {"mac": "0" * 64},
        {"mac": None},
        {"mac": ["a", 1]},
        {"mac": record_of(ME, Group("token", b"other", False))["mac"]},
        {"mac": record_of(ME, Group("another group's", b"horse", False))["mac"]},
        record_of(ME._replace(id=2), GROUP),
    ],
    ids=["address", "rank", "mac", "none", "kind", "other secret", "other group", "record of another rank"],
)
def test_forged_record(forged: dict[str, Any]) -> None:
    with pytest.raises(TelegradError, match=r"record of worker w1 .* was not made with the group's secret"):
        member_of(1, through_store({**record_of(ME, GROUP), **forged}), GROUP)


def test_secret_where_others_have_none() -> None:
    with pytest.raises(
        TelegradError, match=r"w1 \(rank 1\) was started with a secret, but others of the group without"
    ):
        member_of(1, through_store(record_of(ME, GROUP)), Group("token", b"random", True))


@pytest.mark.openssl
def test_forged_entry_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A newcomer does not join a group whose log was forged; members ignore the entry."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    with cluster(1, GIVEN, store=store, dynamic=True) as group:
        forged = ["tcp:10.6.6.6:5"]
        entry = json.dumps([[2, 0, [5, "intruder", 1 << 32, forged, "there"], None], ""])
        store.compare_set("log/0000000002", "", entry)
        with pytest.raises(TelegradError, match="log/0000000002 in the group's store was not made with the group's"):
            Worker("w1", options=GIVEN, store=store)
        with pytest.raises(UnknownWorker):
            rpc.get_worker_info("intruder")
        assert "the entry of epoch 2 of the group has no effect" in caplog.text
        assert [info.name for info in group[0].get_worker_infos()] == ["w0"]


@pytest.mark.openssl
@pytest.mark.parametrize("kind", ["leave", "lose"])
def test_forged_removal(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Members ignore an entry that says that one of them has left or is lost."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    with cluster(2, GIVEN, store=store, dynamic=True) as group:
        membership = group[0]._worker.membership
        assert membership is not None
        epoch = membership.log.view.epoch + 1
        removal = (
            [1, 1, group[1]._worker.incarnation] if kind == "leave" else [2, 1, group[1]._worker.incarnation, "gone"]
        )
        store.compare_set(f"log/{epoch:010}", "", json.dumps([[epoch, *removal], ""]))
        for worker in group:
            assert worker._worker.membership is not None
            worker._worker.membership.refresh()
            assert worker._worker.membership.log.view.epoch == epoch
            assert [info.name for info in worker.get_worker_infos()] == ["w0", "w1"]
        assert group[0].rpc_sync("w1", abs, (-1,)) == 1
        assert f"the entry of epoch {epoch} of the group has no effect" in caplog.text


def test_sealed_entries() -> None:
    entry = sealed("key", [1, "a"], GROUP)
    assert unsealed("key", entry, GROUP, values) == unsealed("other", entry, None, values) == (1, "a")
    open_group = GROUP._replace(shared_secret=True)
    assert unsealed("key", sealed("key", [2, 3], open_group), open_group, values) == (2, 3)
    for key, text, group in (
        ("key", entry, GROUP._replace(secret=b"other")),
        ("key", entry, GROUP._replace(token="other")),
        ("key", entry, open_group),
        ("key", sealed("key", [1, 2], open_group), GROUP),
        ("key", entry.replace("1", "2", 1), GROUP),
        ("key", "nonsense", GROUP),
        ("key", "{}", GROUP),
        ("other", entry, GROUP),
        ("key", sealed("key", [1], GROUP), GROUP),  # of another form
    ):
        with pytest.raises(TelegradError, match=f"{key} in the group's store was not made with the group's secret"):
            unsealed(key, text, group, values)


def values(first: object, second: object) -> tuple[object, object]:
    return first, second


# ---- copies of values that members have written

SEALED = ["log", "checkpoint", "deleted", "lease", "service", "member"]


def sealed_texts(group: Cluster) -> dict[str, tuple[str, str]]:
    """Return the key and the text of a value of each kind."""
    membership = group[0]._worker.membership
    assert membership is not None
    log = membership.log
    assert log.append(Leave(9, 1))[0]  # without effect
    log._raise_to("checkpoint", log._plain_state())
    log._raise_to("deleted", [1])
    with group[0]:
        rpc.register_service("5000", 1)  # a number, as the first field of `deleted`
    keys = [log_key(log.view.epoch), "checkpoint", "deleted", lease_key(1), "service/5000"]
    found = {kind: (key, log.store.get(key) or "") for kind, key in zip(SEALED, keys, strict=False)}
    record = record_of(group[1]._worker.member, group[1]._worker.group)
    return {**found, "member": (member_key(1), json.dumps([record["facts"], record["mac"]]))}


@pytest.mark.openssl
@pytest.mark.parametrize("kind", SEALED)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_copy_at_another_key_removes_no_member(dynamic: bool, kind: str) -> None:
    options = Options(secret=GIVEN.secret, rpc_timeout=30, member_lease=0.8)
    with cluster(2, options, dynamic=dynamic, graceful=False) as group:
        texts = sealed_texts(group)
        text = texts.pop(kind)[1]
        services = [worker._worker.membership for worker in group]
        assert services[0] is not None
        log = services[0].log
        texts["log"] = log_key(log.view.epoch + 1), ""
        for key, own in texts.values():
            with pytest.raises(TelegradError, match=f"{key} in the group's store was not made with the group's secret"):
                unsealed(key, text, log.group, lambda *plain: plain)
            log.store.compare_set(key, own or None, text)
        for service in services:
            assert service is not None
            for _ in range(4):
                renewed = service.renewed
                eventually(lambda s=service, r=renewed: s.renewed > r)  # type: ignore[misc]
            eventually(lambda s=service: s.log.view.epoch == log.view.epoch)  # type: ignore[misc]
        assert [worker._worker.fenced for worker in group] == ["", ""]
        assert [[info.name for info in worker.get_worker_infos()] for worker in group] == [["w0", "w1"]] * 2
        assert group[0].rpc_sync("w1", abs, (-1,)) == group[1].rpc_sync("w0", abs, (-1,)) == 1


@pytest.mark.parametrize(
    "entry",
    [
        [],
        [1],
        [1, 0],
        [1, 7, 1, 2],
        [1, "x", 1, 2],
        [1, 1, {}, 2],
        [1, 1, 1, [2]],
        [1, 2, 1, 2],
        [1, 0, [5, "w5"], None],
        [1, 0, [5, 5, 5, [], "here"], None],
        [1, 0, [[5], "w5", 5, [], "here"], None],
    ],
)
def test_an_entry_of_another_form_has_no_effect(entry: list[object], caplog: pytest.LogCaptureFixture) -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    log = GroupLog(C10dStore(store), GROUP, None)
    log.store.append(1, sealed(log_key(1), entry, GROUP))
    assert log.refresh() == []
    assert (log.view.epoch, log.view.members) == (1, {})
    assert "the entry of epoch 1 of the group has no effect" in caplog.text
    log.store.set("checkpoint", sealed("checkpoint", entry, GROUP))
    with pytest.raises(TelegradError, match="checkpoint in the group's store was not made with the group's secret"):
        GroupLog(log.store, GROUP, None).load()
    for state in ([], ["x"], [None], [[1]]):
        log.store.set("deleted", sealed("deleted", state, GROUP))
        assert log.refresh() == []


def test_an_error_does_not_withhold_the_effects_of_earlier_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later entry cannot be applied."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    writer, reader = (GroupLog(C10dStore(store), GROUP, None) for _ in range(2))
    first, second = (Join(seat_of(ME._replace(id=each, name=f"w{each}"))) for each in (1, 2))
    assert writer.append(first) == (True, [Joined(first.member)])
    monkeypatch.setattr(group_log, "_INTERVAL", 1)
    monkeypatch.setattr(writer, "_write_checkpoint", no_reply)
    assert writer.append(second) == (True, [Joined(second.member)])

    apply = reader.view.apply
    monkeypatch.setattr(reader.view, "apply", lambda change: apply(change) if change == first else no_reply())
    with pytest.raises(RuntimeError, match="no reply"):
        reader.refresh()
    monkeypatch.setattr(reader.view, "apply", apply)
    assert [event.member.name for event in reader.refresh()] == ["w1", "w2"]
    assert reader.refresh() == writer.refresh() == []


def no_reply(*_: object) -> Any:
    raise RuntimeError("no reply")
