"""Reports of waits: in the log while they last, and in the error at the end."""

import logging
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from free_ports import free_port
from membership_helpers import add_member, silent_address

from telegrad import waits
from telegrad.errors import TelegradError
from telegrad.group import hosting, probing, rendezvous, stores
from telegrad.rpc import Options, Worker
from telegrad.testing import cluster, eventually

SHORT = 0.3  # s


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return the log lines of waits, which are logged at once."""
    monkeypatch.setattr(waits, "FIRST_LOG", 0.0)
    caplog.set_level(logging.WARNING, "telegrad")
    return lambda: [r.getMessage() for r in caplog.records if "is waiting for" in r.getMessage()]


def meet(rank: int, where: str, timeout: float = SHORT) -> Any:
    return stores.meet(f"w{rank}", Options(init_method=where, rpc_timeout=timeout), rank, 2)[0]


def test_times_of_the_log_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: clock.now))
    wait = waits.Wait("w1 (rank 1)", 70.0)
    told = []
    for now, pause in ((0.0, 5.0), (4.9, 0.1), (5.0, 30.0), (34.9, 0.1), (35.0, 30.0), (65.0, 5.0), (70.0, 0.001)):
        clock.now = 1000.0 + now
        wait.step(lambda: ("rank 0", "connection refused" if clock.now < 1010 else ""))
        assert wait.pause() == pytest.approx(pause)
        told.append([r.getMessage() for r in caplog.records])
    assert [len(lines) for lines in told] == [0, 0, 1, 1, 2, 3, 3]
    assert told[-1][:2] == [
        "w1 (rank 1) is waiting for rank 0 since 5 s; last: connection refused",
        "w1 (rank 1) is waiting for rank 0 since 35 s",
    ]
    assert wait.left == 0
    assert caplog.records[0].name == "telegrad"
    assert caplog.records[0].levelno == logging.WARNING


def test_polls_are_independent_of_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: clock.now))
    looks = []
    wait = waits.Wait("w1", 60.0, lambda: looks.append(clock.now), 2.0)
    for clock.now in (0.5, 1.9, 2.0, 3.0, 4.5):
        wait.step(lambda: ("none", ""))
    assert looks == [2.0, 4.5]


# ---- for the store


def test_missing_host(log_lines: Callable[[], list[str]]) -> None:
    port = free_port()
    with pytest.raises(
        RuntimeError, match=rf"no store at 127.0.0.1:{port} within .* met: connection refused"
    ) as failed:
        meet(1, f"tcp://127.0.0.1:{port}")
    assert "\n" not in str(failed.value)
    assert len(log_lines()) == 1
    assert log_lines()[0].startswith(f"w1 (rank 1) is waiting for rank 0's store at 127.0.0.1:{port} since ")
    assert log_lines()[0].endswith(" s; last: connection refused")


def test_missing_host_on_another_machine(log_lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_is_local", lambda *_: False)
    port = free_port()
    with pytest.raises(RuntimeError, match=rf"no store at 127.0.0.1:{port} within 0.3 s"):
        meet(1, f"tcp://127.0.0.1:{port}")
    assert log_lines()[0].endswith(" s; last: connection refused")
    with pytest.raises(
        RuntimeError, match=rf"no store at 127.0.0.1:{port} within 0.3 s: its host did not start in time"
    ):
        stores.meet("helper", Options(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=SHORT), -1, None)
    assert log_lines()[1].startswith("helper is waiting for the group's store at 127.0.0.1:")


class Page(BaseHTTPRequestHandler):
    """Web server that does not log."""

    def log_message(self, *_: Any) -> None:
        pass


class Banner(threading.Thread):
    """Server that sends first, or never."""

    def __init__(self, words: bytes) -> None:
        super().__init__(daemon=True)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.server_port: int = self.listening.getsockname()[1]
        self.words = words

    def run(self) -> None:
        links = []
        while True:
            try:
                links.append(self.listening.accept()[0])
            except OSError:
                break
            links[-1].sendall(self.words)
        for link in links:
            link.close()

    def shutdown(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self.join()
        self.listening.close()


def serve(kind: str) -> Any:
    if kind != "http":
        server = Banner(b"SSH-2.0-OpenSSH_9.2p1\r\n" if kind == "ssh" else b"")
        server.start()
        return server
    page = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return page


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(probing, "_HINT_AFTER", 0.05)
    found = serve(request.param)
    yield found
    found.shutdown()
    if isinstance(found, HTTPServer):
        found.server_close()


@pytest.mark.parametrize(
    ("server", "answer"), [("http", "an HTTP server"), ("ssh", "another program: .*SSH-2")], indirect=["server"]
)
@pytest.mark.parametrize("here", [True, False])
def test_another_program_has_the_port(server: Any, answer: str, here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_is_local", lambda *_: here)
    where = f"tcp://127.0.0.1:{server.server_port}"
    text = rf"the program at 127.0.0.1:{server.server_port} is not the store of a group, but {answer}"
    with pytest.raises(TelegradError, match=text):
        meet(1, where, 30)
    with pytest.raises(TelegradError, match=text):
        stores.meet("helper", Options(init_method=where, rpc_timeout=30), -1, None)
    with pytest.raises(TelegradError, match=text):
        meet(0, where, 30)


def test_another_group_has_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "_HANDOVER", 0.1)
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(TelegradError, match=rf"at 127.0.0.1:{port}: the store of another group has the port"):
        meet(0, f"tcp://127.0.0.1:{port}", 30)
    del store


@pytest.mark.parametrize("server", ["silent"], indirect=True)
def test_another_program_has_the_port_and_sends_nothing(
    server: Any, log_lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "_TIMEOUT", 0.1)
    with pytest.raises(RuntimeError, match="met: the port is open, but its program does not reply as a store does"):
        meet(1, f"tcp://127.0.0.1:{server.server_port}")
    assert log_lines()[0].endswith("; last: the port is open, but its program does not reply as a store does")
    monkeypatch.setattr(hosting, "_HANDOVER", 0.1)
    with pytest.raises(TelegradError, match=rf"at 127.0.0.1:{server.server_port}: another program has the port"):
        meet(0, f"tcp://127.0.0.1:{server.server_port}", 30)


@pytest.mark.parametrize("libuv", [True, False])
def test_a_store_is_recognized(libuv: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)  # type: ignore[attr-defined]
    assert probing.probe("127.0.0.1", store.port, 30) == ""
    assert "refused" in probing.probe("127.0.0.1", free_port(), 30)


@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_unknown_host(rank: int, log_lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    options = Options(init_method="tcp://nowhere.example:29500", rpc_timeout=SHORT)
    text = (
        "the host nowhere.example of the group's store cannot be resolved: Name or service not known. Check MASTER_ADDR"
    )
    with pytest.raises(RuntimeError) as failed:
        stores.meet("w", options, rank, 2 if rank >= 0 else None)
    assert str(failed.value) == f"{text}, or init_method."
    name = f"w (rank {rank})" if rank >= 0 else "w"
    assert log_lines()[0].startswith(f"{name} is waiting for the address of nowhere.example, the store's host since ")


def test_unresponsive_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: asked.wait())
    with pytest.raises(RuntimeError, match=r"the host of\.example of the group's store cannot be resolved: no answer"):
        meet(1, "tcp://of.example:29500")
    asked.set()


# ---- for workers


def test_missing_ranks(log_lines: Callable[[], list[str]], tmp_path: Path) -> None:
    for rank, missing in ((0, "1, 3"), (1, "0, 3")):
        store = dist.FileStore(str(tmp_path / f"meeting{rank}"), 4)  # type: ignore[attr-defined]
        store.set("member/2", "{}")
        with pytest.raises(TelegradError, match=rf"those with rank {missing} of 4 did not join"):
            Worker(f"w{rank}", rank, 4, Options(rpc_timeout=SHORT), store=store)
    first, second = log_lines()
    where = f"of 4 at {tmp_path / 'meeting'}"
    assert first.startswith(f"w0 (rank 0) is waiting for ranks 1, 3 {where}0 since ")
    assert first.endswith("; last: 2 have joined")
    assert second.startswith(f"w1 (rank 1) is waiting for ranks 0, 3 {where}1 since ")


class Counting:
    """Store that counts its queries."""

    def __init__(self, there: set[int]) -> None:
        self.keys = {f"member/{rank}" for rank in there}
        self.questions = 0

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return self.keys >= set(keys)


def test_few_queries_find_the_missing_ranks() -> None:
    for missing in ([], [0], [255], [3, 77]):
        store = Counting(set(range(256)) - set(missing))
        assert rendezvous._missing(store, 0, 256) == missing
        assert store.questions <= 1 + 16 * len(missing)


def test_member_that_is_silent(log_lines: Callable[[], list[str]], caplog: pytest.LogCaptureFixture) -> None:
    """A newcomer reports the member whose connection it awaits."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    options = Options(member_lease=2.0, transports=("tcp",))
    with cluster(1, options, store=store, dynamic=True) as group, silent_address() as address:
        add_member(store, group[0], "mute", address)
        joined = Worker("w1", options=options, store=store)
        joined.shutdown(timeout=30)
    assert re.match(r"w1 is waiting for a connection to .*mute \(rank 5\) since ", log_lines()[0])
    assert "worker w1 joins without a connection to worker mute, which neither answers nor renews" in caplog.text


PROGRAM = """
import sys
from telegrad import rpc
from telegrad.group import attempts
from telegrad import waits
waits.FIRST_LOG, attempts._OUTSIDE_CHECK = 0.0, 60.0  # nothing but the signal ends a pause
rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=rpc.Options(init_method=sys.argv[1], rpc_timeout=50))
"""


def sleeps_of(pid: int) -> int:
    """Return how often the main thread of a process has slept."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_interrupted_at_once(tmp_path: Path, scheme: str) -> None:
    """Ctrl+C ends the wait, also if the store is a file."""
    where = f"file://{tmp_path}/meeting" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, where], stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert "w1 (rank 1) is waiting for rank" in waiting.stderr.readline()
        before = sleeps_of(waiting.pid)
        eventually(lambda: sleeps_of(waiting.pid) > before + 5)  # it waits again
        waiting.send_signal(signal.SIGINT)
        waiting.wait(20)
        assert waiting.stderr.read().endswith("KeyboardInterrupt\n")
    assert waiting.returncode == -signal.SIGINT
