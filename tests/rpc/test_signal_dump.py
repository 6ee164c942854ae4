"""Dumps on SIGUSR2: the option `dump_on_sigusr2`."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from telegrad.testing import cluster
from telegrad.worker.diagnostics import signal_dump

PROGRAM = """
import ctypes, signal, sys
from telegrad import rpc
from torch.distributed import HashStore

if "{before}":
    signal.signal(signal.SIGUSR2, lambda *_: print("program's handler", flush=True))
store = HashStore()
with rpc.Worker("w0", store=store), rpc.Worker("w1", store=store) as last:  # in the main thread
    {body}
    last.shutdown()
print("end", flush=True)
"""


@pytest.fixture
def program() -> Iterator[object]:
    running: list[subprocess.Popen[str]] = []

    def start(body: str, before: str = "", code: str = PROGRAM, **environment: str) -> subprocess.Popen[str]:
        code = code.format(body=body, before=before)
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"TELEGRAD_DUMP_ON_SIGUSR2": "1"} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read stderr up to a line with a text."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if text in line:
            return seen
    raise AssertionError(seen)


WAITS = (
    'future = rpc.rpc_async("w0", lambda: sys.stdin.readline());'
    ' print("ready", flush=True); print(repr(future.wait()), flush=True)'
)


def signaled(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR2)


def test_snapshots_and_stacks_of_a_program_that_waits(program: object) -> None:
    process = program(WAITS)  # type: ignore[operator]
    signaled(process)
    first = read_until(process, "SIGUSR2: worker w")
    assert "Thread 0x" in first
    assert "most recent call first" in first
    both = first + read_until(process, "SIGUSR2: worker w")
    assert all(f"SIGUSR2: worker w{each} (id {each}, incarnation " in both for each in range(2))
    assert process.communicate("on\n", timeout=20)[0].endswith("'on\\n'\nend\n")
    assert process.returncode == 0


def test_stacks_while_a_thread_holds_the_gil(program: object) -> None:
    body = 'print("ready", flush=True); ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(8), 8)'
    process = program(body)  # type: ignore[operator]
    signaled(process)
    assert 'File "<string>"' in read_until(process, 'File "<string>"')
    process.communicate("on\n", timeout=20)


def test_the_handler_of_the_program_runs_too(program: object) -> None:
    process = program(WAITS, before="yes")  # type: ignore[operator]
    signaled(process)
    assert process.stdout.readline() == "program's handler\n"
    read_until(process, "SIGUSR2: worker w")
    assert process.communicate("on\n", timeout=20)[0].endswith("end\n")


def test_without_the_option_the_signal_ends_the_process(program: object) -> None:
    process = program(WAITS, TELEGRAD_DUMP_ON_SIGUSR2="0")  # type: ignore[operator]
    signaled(process)
    assert process.wait(20) == -signal.SIGUSR2


JOINS = """
import sys
from telegrad import rpc
from telegrad.group import stores

def meet(*_):
    print("ready", flush=True)
    print(repr(sys.stdin.readline()), flush=True)
    sys.exit(0)

stores.meet = meet  # a store that is not reached
{body}
"""


@pytest.mark.parametrize("join", ["rpc.init_rpc", "rpc.Worker"])
def test_the_stacks_of_a_process_that_waits_for_the_store(program: object, join: str) -> None:
    process = program(f'{join}("w1", rank=1, world_size=2)', code=JOINS)  # type: ignore[operator]
    signaled(process)
    assert "in meet" in read_until(process, "SIGUSR2: this process has no worker")
    assert process.communicate("on\n", timeout=20)[0] == "'on\\n'\n"
    assert process.returncode == 0


OUTSIDE = """
import signal, sys, threading
from telegrad import rpc
from torch.distributed import HashStore

if "{before}":
    signal.signal(signal.SIGUSR2, lambda *_: print("program's handler", flush=True))
store, workers = HashStore(), []
joining = threading.Thread(target=lambda: workers.append(rpc.Worker("w0", store=store)))
joining.start()
joining.join()
{body}
print("ready", flush=True)
sys.stdin.readline()
workers[0].shutdown(graceful=False)
print("end", flush=True)
"""


@pytest.mark.parametrize("before", [pytest.param("", marks=pytest.mark.slow), "yes"])
def test_outside_of_the_main_thread_there_are_stacks_only(program: object, before: str) -> None:
    process = program("", before, OUTSIDE)  # type: ignore[operator]
    signaled(process)
    seen = read_until(process, 'File "<string>"')
    assert "SIGUSR2 writes stacks but no snapshots" in seen
    if before:
        assert process.stdout.readline() == "program's handler\n"
    out, errors = process.communicate("on\n", timeout=20)
    assert out.endswith("end\n")
    assert "SIGUSR2: worker" not in seen + errors


def test_a_later_worker_in_the_main_thread_adds_snapshots(program: object) -> None:
    process = program('workers.append(rpc.Worker("w1", store=store))', "yes", OUTSIDE)  # type: ignore[operator]
    signaled(process)
    seen = read_until(process, "SIGUSR2: worker w")
    assert "most recent call first" in seen
    assert process.stdout.readline() == "program's handler\n"
    process.communicate("on\n", timeout=20)


def test_it_is_installed_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    chains: list[bool] = []
    monkeypatch.setattr(signal_dump, "_writes_stacks", False)
    monkeypatch.setattr(signal_dump, "_logs_snapshots", False)
    monkeypatch.setattr(signal_dump.faulthandler, "register", lambda *_, chain, **__: chains.append(chain))
    for _ in range(2):
        thread = threading.Thread(target=signal_dump.install)
        thread.start()
        thread.join()
    assert chains == [False]
    assert caplog.text.count("SIGUSR2 writes stacks but no snapshots") == 1


def test_the_snapshots_of_all_workers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "telegrad"):
        signal_dump.log_snapshots()
        assert "this process has no worker" in caplog.text
        with cluster(2):
            signal_dump.log_snapshots()
    assert "SIGUSR2: worker w0 (id 0, incarnation " in caplog.text
    assert "SIGUSR2: worker w1 (id 1, incarnation " in caplog.text


def test_a_failed_snapshot_does_not_prevent_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("closing")

    monkeypatch.setattr(signal_dump, "snapshot", fail)
    with cluster(2):
        signal_dump.log_snapshots()
    assert "no snapshot of worker w0" in caplog.text
    assert "no snapshot of worker w1" in caplog.text
