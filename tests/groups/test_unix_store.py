"""Access to the store over a Unix socket."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from free_ports import free_port
from process_helpers import TIMEOUT

from telegrad.group import hosting
from telegrad.group.group_store import C10dStore
from telegrad.group.rendezvous import StoreGone
from telegrad.group.store_waits import Part, StoreUnresponsive, find
from telegrad.group.unix_store import LocalStore, UnixStoreServer, request_release
from telegrad.rpc import Options, start

LONG = timedelta(seconds=TIMEOUT)
BLINK = timedelta(seconds=0.05)


@pytest.fixture
def backing() -> Any:
    """Return the store that the server serves."""
    return dist.HashStore()  # type: ignore[attr-defined]


@pytest.fixture
def port(backing: Any) -> Iterator[int]:
    """Run a server, and return its port."""
    number = free_port()
    server = UnixStoreServer(number)
    server.open(backing)
    yield number
    server.close()


def later(function: Callable[[], Any]) -> "threading.Thread":
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_written_keys_are_in_the_backing_store(port: int, backing: Any) -> None:
    store = LocalStore("localhost", port, LONG)
    store.set("text", "äö")
    store.set("bytes", b"\0\xff")
    assert (backing.get("text"), backing.get("bytes")) == ("äö".encode(), b"\0\xff")
    assert store.get("bytes") == b"\0\xff"
    assert store.compare_set("chosen", "", "mine") == b"mine"
    assert LocalStore("localhost", port, LONG).compare_set("chosen", "", "other") == b"mine"
    assert (store.add("count", 2), store.add("count", 3)) == (2, 5)
    assert store.check(["text", "count"])
    assert not store.check(["text", "nothing"])
    assert store.delete_key("text")
    assert not store.delete_key("text")
    assert not backing.check(["text"])
    large = os.urandom(5_000_000)  # more than a socket buffers
    store.set("large", large)
    assert store.get("large") == large


def test_use_through_torchs_prefix_store(port: int, backing: Any) -> None:
    """PrefixStore uses the store from C++."""
    whole = LocalStore("localhost", port, LONG)
    part = dist.PrefixStore("part", whole)  # type: ignore[attr-defined]
    part.set("key", "value")
    assert backing.get("part/key") == b"value"
    assert part.get("key") == b"value"
    assert part.has_extended_api()
    assert part.multi_get(["key"]) == [b"value"]
    assert part.delete_key("key")
    assert not backing.check(["part/key"])
    part.set_timeout(BLINK)
    assert whole.timeout == BLINK
    with pytest.raises(RuntimeError):
        part.wait(["nothing"])


def test_values_are_found_without_a_wait_and_missing_keys_remain_missing(port: int, backing: Any) -> None:
    store = LocalStore("localhost", port, LONG)
    part = Part("part", store)
    part.set("empty", "")
    part.set("bytes", b"\0\xff")
    wanted = [None, b"", b"\0\xff", None]
    assert store.find_now(["bytes", "part/empty", "part/bytes", "part/none"]) == wanted
    assert find(part, ["none", "empty", "bytes", "other"]) == wanted
    assert find(Part("part", backing), ["none", "empty", "bytes", "other"]) == wanted
    assert not store.check(["part/none"])


@pytest.mark.parametrize("writer", ["over the socket", "directly"])
def test_waiting_clients_are_notified_of_writes(port: int, backing: Any, writer: str) -> None:
    other = LocalStore("localhost", port, LONG) if writer == "over the socket" else backing
    store, asking = LocalStore("localhost", port, LONG), LocalStore("localhost", port, LONG)
    got: list[bytes] = []
    threads = [later(lambda: store.wait(["a", "b"], LONG)), later(lambda: got.append(asking.get("b")))]
    other.set("unrelated", "0")
    other.set("a", "1")
    assert threads[0].is_alive()
    other.set("b", "2")
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert got == [b"2"]


def test_after_a_timed_out_wait_the_store_can_be_used(port: int, backing: Any) -> None:
    store = LocalStore("localhost", port, BLINK)
    for wait in (lambda: store.wait(["nothing"]), lambda: store.get("nothing"), lambda: store.wait(["x"], BLINK)):
        with pytest.raises(dist.DistStoreError):
            wait()
    store.set("x", "1")
    assert backing.get("x") == b"1"


def test_errors_of_the_backing_store(port: int) -> None:
    store = LocalStore("localhost", port, LONG)
    store.set("word", "one")
    with pytest.raises(dist.DistStoreError):
        store.add("word", 1)
    assert store.get("word") == b"one"


@pytest.mark.parametrize(
    "sent", [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\1\0\0\0\x63", b"\5\0\0\0\0\xff\xff\xff\xff", b"\2"], ids=repr
)
def test_invalid_messages_affect_no_other_client(port: int, sent: bytes) -> None:
    store = LocalStore("localhost", port, LONG)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0telegrad-store-{port}")
        client.sendall(sent)
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_a_closing_server_disconnects_all_clients(backing: Any) -> None:
    number = free_port()
    with pytest.raises(ConnectionRefusedError):
        LocalStore("localhost", number, LONG)
    server = UnixStoreServer(number)
    with pytest.raises(OSError, match="in use"):
        UnixStoreServer(number)
    server.open(backing)
    store = LocalStore("localhost", number, LONG)
    ended = []

    def wait() -> None:
        with pytest.raises(StoreGone):
            store.get("nothing")
        ended.append(True)

    thread = later(wait)
    server.close()
    thread.join(TIMEOUT)
    assert ended == [True]
    with pytest.raises(StoreGone):
        store.get("nothing")
    UnixStoreServer(number).close()


def test_a_stopped_server_rejects_clients_and_frees_its_address(backing: Any, caplog: pytest.LogCaptureFixture) -> None:
    number = free_port()
    for _ in range(20):
        server = UnixStoreServer(number)
        server.open(backing)
        LocalStore("localhost", number, LONG).set("key", "value")
        server.close_later()
        with pytest.raises(ConnectionRefusedError):
            LocalStore("localhost", number, LONG)
    UnixStoreServer(number).close()
    assert not caplog.records


HOST_THAT_EXITS = """
import os, sys, threading, time
from datetime import timedelta
from telegrad import rpc
from telegrad.group.unix_store import LocalStore, UnixStoreServer

class Slow:
    def set(self, key, value):
        begun.set()
        time.sleep(0.3)
        os.write(1, b"the operation has ended")

begun = threading.Event()
server = UnixStoreServer(int(sys.argv[1]))
server.open(Slow())
client = LocalStore("localhost", int(sys.argv[1]), timedelta(seconds=60))
threading.Thread(target=client.set, args=("key", "value"), daemon=True).start()
begun.wait()
"""


def test_a_process_exits_after_the_operations_of_its_store() -> None:
    """An operation that is inside torch's code at the end would crash the process."""
    program = [sys.executable, "-c", HOST_THAT_EXITS, str(free_port())]
    ended = subprocess.run(program, check=False, capture_output=True, text=True, timeout=TIMEOUT)
    assert (ended.returncode, ended.stdout) == (0, "the operation has ended"), ended.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_rejected(port: int) -> None:
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        try:
            LocalStore("localhost", port, LONG)
        except ConnectionRefusedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_joiner_marks_no_failure_in_the_store_of_the_next_group(backing: Any) -> None:
    """The store closes before the joiner uses it, and the next host has its address."""
    number = free_port()
    closing = UnixStoreServer(number)
    closing.open(dist.HashStore())  # type: ignore[attr-defined]
    store = Part("rpc_prefix_0", LocalStore("localhost", number, LONG))
    closing.close()
    following = UnixStoreServer(number)
    following.open(backing)
    with pytest.raises(StoreGone):
        start.join(store, "w1", 1, 2, Options())
    assert backing.num_keys() == 0
    following.close()


class Silent:
    """Store that replies to nothing until its end."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def __getattr__(self, _: str) -> Any:
        return lambda *_: self.end.wait()


def replace(server: UnixStoreServer, number: int, backing: Any) -> UnixStoreServer:
    """Close a server and open that of another group at its port."""
    server.close()
    following = UnixStoreServer(number)
    following.open(backing)
    return following


def test_after_a_timed_out_wait_a_client_uses_no_other_store(backing: Any) -> None:
    number = free_port()
    server = UnixStoreServer(number)
    server.open(dist.HashStore())  # type: ignore[attr-defined]
    store = LocalStore("localhost", number, LONG)
    group = C10dStore(Part("part", store))
    group.set("token", "first")
    with pytest.raises(dist.DistStoreError):
        store.wait(["nothing"], BLINK)
    server = replace(server, number, backing)
    for _ in range(2):
        with pytest.raises(StoreGone, match="has ended, and another one has its port"):
            store.set("key", "1")
    with pytest.raises(StoreGone):
        group.get("token")
    with pytest.raises(StoreGone, match="is not that of the group"):
        group.reconnect(TIMEOUT, lambda found: found.check(["token"]))
    assert backing.num_keys() == 0
    backing.set("part/token", "second")
    assert group.reconnect(TIMEOUT, lambda found: found.check(["token"]))
    assert group.get("token") == "second"
    server.close()


def test_a_silent_host_is_not_a_missing_key(backing: Any) -> None:
    number = free_port()
    silent = Silent()
    server = UnixStoreServer(number)
    server.open(silent)  # type: ignore[arg-type]
    store = LocalStore("localhost", number, BLINK)
    group = C10dStore(store)
    with pytest.raises(StoreUnresponsive, match=r"has not replied within 0\.05 s"):
        group.set("key", "1")
    silent.end.set()
    server = replace(server, number, backing)
    with pytest.raises(StoreGone, match="has ended"):
        group.set("key", "1")
    assert backing.num_keys() == 0
    server.close()


def test_a_client_of_the_hosts_process_keeps_the_store_after_a_reconnect() -> None:
    port = free_port()
    store: Any = hosting.host_for_worker(hosting.StoreAddress("127.0.0.1", port, 0, True), LONG)
    again = store.connect_again(TIMEOUT)
    del store
    request_release(port)
    again.set("key", "1")
    assert LocalStore("localhost", port, LONG).check(["key"])
    del again
    hosting.latest.clear()
