"""Groups on real etcd: no process of the group is indispensable."""

import gc
import itertools
import json
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest
from etcd_helpers import Etcd, address_of, etcd_cluster
from free_ports import free_port
from process_helpers import TIMEOUT, Actor, actors, call_many
from test_membership_processes import join, join_static, leave, names, process_of

from telegrad import waits
from telegrad.group import etcd_store, stores
from telegrad.group.etcd_client import EtcdClient, EtcdGone, EtcdRefused
from telegrad.group.etcd_store import EtcdStore, endpoints_of
from telegrad.group.group_store import GroupStore, group_store_of
from telegrad.group.store_waits import Part
from telegrad.rpc import Options, Worker
from telegrad.testing import eventually, run_all
from telegrad.waits import Wait

_numbers = itertools.count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Etcd]]:
    with etcd_cluster(1, tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def where(etcd: list[Etcd]) -> str:
    return address_of(etcd, f"group{next(_numbers)}")


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, method="none") as group:
        yield group


def store_at(where: str) -> EtcdStore:
    return EtcdStore(where, timedelta(seconds=5), Wait("w0", 5))


def test_values_and_counters(where: str) -> None:
    store = store_at(where)
    part = Part("some", Part("part", store))
    assert not part.check(["key"])
    part.set("key", "value")
    assert part.get("key") == b"value"
    assert store.get("part/some/key") == b"value"
    assert part.compare_set("key", "other", "new") == b"value"
    assert part.compare_set("key", "value", "new") == b"new"
    assert part.compare_set("missing", "", "first") == b"first"
    assert part.compare_set("missing", "", "second") == b"first"
    assert part.compare_set("absent", "expected", "x") == b"expected"
    assert [part.add("count", 2), part.add("count", 1)] == [2, 3]
    assert part.multi_get(["key", "missing"]) == [b"new", b"first"]
    with pytest.raises(RuntimeError, match="no key part/some/absent within the timeout"):
        part.wait(["absent"], timedelta(seconds=0.05))


def test_a_counter_gives_each_client_a_number_of_its_own(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client adds between the read and the write of another: equal sums."""
    first, second = store_at(where), store_at(where)
    numbers: list[int] = []
    read = first.client.get

    def read_and_be_late(key: str) -> str | None:
        found = read(key)
        if not numbers:
            numbers.append(second.add("ids", 1))
        return found

    monkeypatch.setattr(first.client, "get", read_and_be_late)
    numbers.append(first.add("ids", 1))
    assert numbers == [1, 2]
    numbers += run_all([lambda: store_at(where).add("ids", 1) for _ in range(20)])
    assert sorted(numbers) == list(range(1, 23))


class _StartsLate(BaseHTTPRequestHandler):
    """Gateway of an etcd that has no key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def test_a_worker_waits_for_etcd_to_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Etcd starts once the worker has logged that it waits."""
    monkeypatch.setattr(etcd_store, "_TIMEOUT", 0.2)
    monkeypatch.setattr(waits, "FIRST_LOG", 0.5)
    port = free_port()
    started: list[HTTPServer] = []

    def start(record: logging.LogRecord) -> bool:
        if not started and "is waiting for etcd" in record.getMessage():
            started.append(HTTPServer(("127.0.0.1", port), _StartsLate))
            threading.Thread(target=started[0].serve_forever).start()
        return True

    caplog.handler.addFilter(start)
    try:
        options = Options(init_method=f"etcd://127.0.0.1:{port}/group", rpc_timeout=TIMEOUT)
        store = stores.meet("w0", options, 1, 2)[0]
        assert not store.check(["key"])
    finally:
        caplog.handler.removeFilter(start)
        for server in started:
            server.shutdown()
            server.server_close()
    assert f"w0 (rank 1) is waiting for etcd at 127.0.0.1:{port} since " in caplog.text


@pytest.mark.parametrize("prefix", ["", "part"])
def test_log_and_counters_of_a_group(where: str, prefix: str) -> None:
    store = store_at(where)
    group: GroupStore = group_store_of(Part(prefix, store) if prefix else store)
    assert group.recovers
    grown = threading.Semaphore(0)
    end = group.watch(grown.release)
    assert end is not None
    assert grown.acquire(timeout=TIMEOUT)  # the watch has begun
    assert group.read(1) == ([], [])
    assert group.append(1, "first") == "first"
    assert grown.acquire(timeout=TIMEOUT)
    assert group.append(1, "other") == "first"
    assert group.append(2, "second") == "second"
    assert [group.read(epoch)[0] for epoch in (1, 2, 3)] == [["first", "second"], ["second"], []]
    assert group.read(2, ["none", "log/0000000001"]) == (["second"], [None, "first"])
    assert group.get_all(["log/0000000002", "none"]) == ["second", None]
    many = [f"none/{i}" for i in range(300)]  # more than etcd reads in one request
    assert group.read(2, [*many, "log/0000000001"]) == (["second"], [*[None] * len(many), "first"])
    assert (group.get("log/0000000001"), group.get("none")) == ("first", None)
    group.forget(range(1, 2))
    assert (group.read(1), group.get("log/0000000001")) == (([], []), None)
    assert group.append(4, "after a gap") == "after a gap"
    assert group.read(2)[0] == ["second"]
    assert [group.add("ids", 1), group.add("ids", 1)] == [1, 2]
    assert group.compare_set("key", None, "a") == "a"
    assert group.compare_set("key", None, "b") == "a"
    assert group.compare_set("key", "x", "b") == "a"
    assert group.compare_set("key", "a", "b") == "b"
    assert group.compare_set("none", "a", "b") is None
    end()


def test_a_value_of_nearly_the_largest_request_is_replaced(where: str) -> None:
    """A request with both values would be larger than etcd allows, which is 1.5 MiB."""
    group: GroupStore = group_store_of(store_at(where))
    first, second, third = (letter * 1_000_000 for letter in "abc")
    assert group.compare_set("key", None, first) == first
    assert group.compare_set("key", second, third) == first
    assert group.compare_set("key", first, second) == second
    assert group.get("key") == second


def test_leases_end_without_renewals(where: str) -> None:
    group: GroupStore = group_store_of(store_at(where))
    assert group.compare_set("lease/0", None, "1", 1.0) == "1"
    assert group.compare_set("lease/1", None, "1", 1.0) == "1"
    count = 1

    def renew() -> bool:
        nonlocal count
        count += 1
        assert group.compare_set("lease/1", str(count - 1), str(count), 1.0) == str(count)
        return group.get("lease/0") is None

    eventually(renew, timeout=TIMEOUT)
    assert group.get("lease/1") == str(count)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("etcd://host:1/group", ([("host", 1)], "group")),
        ("etcd://host/group/", ([("host", 2379)], "group")),
        ("etcd://a:1,b,[::1]:3/some/group", ([("a", 1), ("b", 2379), ("::1", 3)], "some/group")),
    ],
)
def test_addresses(address: str, found: object) -> None:
    assert endpoints_of(address) == found


@pytest.mark.parametrize("address", ["etcd://host:1", "etcd://host:1/", "etcd:///group", "etcd://:1/group"])
def test_incomplete_address(address: str) -> None:
    with pytest.raises(ValueError, match="lacks an endpoint or the name of the group"):
        Worker("w", options=Options(init_method=address))


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("secret", [None, "a secret of the group"])
def test_the_history_of_a_remote_etcd_keeps_the_random_secret(
    where: str, remote: bool, secret: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if remote:
        monkeypatch.setattr(etcd_store, "is_loopback", lambda _: False)
    Worker("w0", 0, 1, Options(init_method=where, secret=secret)).shutdown()
    is_logged = "the random secret of the group remains in the history of etcd at 127.0.0.1:" in caplog.text
    assert is_logged == (remote and secret is None)


def test_etcd_that_does_not_reply() -> None:
    port = free_port()
    with pytest.raises(EtcdGone, match=rf"etcd at 127.0.0.1:{port} did not reply within 0.2 s: .*refused"):
        Worker("w", options=Options(init_method=f"etcd://127.0.0.1:{port}/group", rpc_timeout=0.2))


class _Replies(BaseHTTPRequestHandler):
    """Gateway that replies with the statuses and texts of `replies`, then no more."""

    replies: list[tuple[int, str]]
    ended: threading.Event

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.replies:
            self.ended.wait(TIMEOUT)
            return
        status, text = self.replies.pop(0)
        content = json.dumps({"error": text}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def gateway(*replies: tuple[int, str]) -> Iterator[int]:
    """Run a gateway with some replies; yield its port."""
    ended = threading.Event()
    kind = type("Gateway", (_Replies,), {"replies": list(replies), "ended": ended})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield server.server_address[1]
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


def test_a_refusal_is_raised_at_once() -> None:
    with gateway((400, "etcdserver: request is too large"), (200, "")) as port:
        client = EtcdClient([("127.0.0.1", port)], TIMEOUT)
        with pytest.raises(EtcdRefused, match=r"refused a request \(kv/put\) with 400: .* request is too large"):
            client.put("key", "value")
        client.put("key", "value")
        client.close()


def test_etcd_that_is_busy_is_asked_again() -> None:
    with gateway((429, "too many requests"), (503, "no leader"), (408, "timed out"), (200, "")) as port:
        client = EtcdClient([("127.0.0.1", port)], TIMEOUT)
        client.put("key", "value")
        client.close()


def test_the_last_attempt_does_not_hide_the_reason() -> None:
    """No time is left for a reply to the second attempt."""
    with gateway((503, "no leader")) as port:
        client = EtcdClient([("127.0.0.1", port)], 0.3)
        with pytest.raises(EtcdGone, match="etcd replied 503: no leader"):
            client.put("key", "value")
        client.close()


def test_a_lease_that_expires_after_its_renewal(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(where)
    group: GroupStore = group_store_of(store)
    assert group.compare_set("lease/0", None, "1", 60.0) == "1"
    keep_alive = store.client.keep_alive

    def renew_and_expire(lease: str) -> bool:
        renewed = keep_alive(lease)
        store.client.request("lease/revoke", {"ID": lease})
        return renewed

    with monkeypatch.context() as patch:
        patch.setattr(store.client, "keep_alive", renew_and_expire)
        assert group.compare_set("lease/0", None, "2", 60.0) == "2"
    assert group.compare_set("lease/0", "2", "3", 60.0) == "3"


@pytest.mark.filterwarnings("error")
def test_a_client_in_a_reference_cycle_closes_its_connection(etcd: list[Etcd]) -> None:
    gc.collect()
    client = EtcdClient([("127.0.0.1", etcd[0].port)], 1.0)
    client.get("any")
    client.itself = client  # type: ignore[attr-defined]
    del client
    gc.collect()  # pytest fails a test with a warning that cannot be raised


def test_next_endpoint_is_used(etcd: list[Etcd]) -> None:
    client = EtcdClient([("127.0.0.1", free_port()), ("127.0.0.1", etcd[0].port)], 5.0)
    client.put("telegrad/test", "value")
    assert client.get("telegrad/test") == "value"
    client.close()


def test_static_group(where: str) -> None:
    """Groups at one address follow each other, and each has all its members."""
    for _ in range(2):
        options = Options(init_method=where, rpc_timeout=TIMEOUT)
        group = run_all([lambda rank=rank: Worker(f"w{rank}", rank, 3, options) for rank in range(3)])  # type: ignore[misc] # noqa: B023
        assert group[0].rpc_sync("w2", abs, (-1,)) == 1
        run_all([lambda worker=worker: worker.shutdown(timeout=TIMEOUT) for worker in group])  # type: ignore[misc]


def test_newcomers_join_without_the_first_worker(three: list[Actor], where: str) -> None:
    """Rank 0 is killed: no process of the group hosts the store."""
    first, second, third = three
    for actor in (first, second):
        actor.do(join, actor.name, where)
    assert second.do(call_many, "w0", 2) == 2
    first.end()
    assert third.do(join, third.name, where) < 2.0
    eventually(lambda: second.do(names) == ["w1", "w2"])
    for actor in (second, third):
        for name in ("w1", "w2"):
            assert actor.do(call_many, name, 2) == 2
    third.do(leave)
    assert second.do(names) == ["w1"]
    second.do(leave)


def test_rank_0_of_a_static_group_comes_back(three: list[Actor], where: str) -> None:
    first, second, again = three
    steps = [actor.begin(join_static, actor.name, actor.rank, 2, where) for actor in (first, second)]
    for step in steps:
        step.result()
    assert second.do(call_many, "w0", 2) == 2
    first.end(signal.SIGKILL)
    again.do(join_static, "w0", 0, 2, where)
    assert second.do(process_of, "w0") == again.process.pid
    for step in [actor.begin(leave) for actor in (again, second)]:
        step.result()


@pytest.mark.slow
def test_leader_of_etcd_is_killed(three: list[Actor], tmp_path: Path) -> None:
    """Calls continue, a worker joins after the election, and no member is lost."""
    (tmp_path / "etcd").mkdir()
    with etcd_cluster(3, tmp_path / "etcd") as cluster:
        where = address_of(cluster, "group")
        first, second, third = three
        for actor in (first, second):
            actor.do(join, actor.name, where)
        leader = next(each for each in cluster if each.is_leader())
        leader.kill()
        begun = time.monotonic()
        assert second.do(call_many, "w0", 100) == 100
        third.do(join, third.name, where)
        assert time.monotonic() - begun < 15
        for actor in three:
            for name in ("w0", "w1", "w2"):
                assert actor.do(call_many, name, 2) == 2
            assert actor.do(names) == ["w0", "w1", "w2"]
            assert "out of its group" not in actor.stderr()
        for actor in three:
            actor.do(leave)
