"""The kernel's report about a process: only one that is certain counts as its end."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from stopped_processes import resume, stop

from telegrad.group import process_identity
from telegrad.group.process_identity import GONE, RUNNING, STOPPED, UNKNOWN, fate_of, own_process


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open(f"/proc/{process.pid}/stat") as f:
        started = f.read().rpartition(")")[2].split()[19]
    yield process, f"{own_process().rpartition('/')[0].rpartition('/')[0]}/{process.pid}/{started}"
    process.kill()
    process.communicate()


def test_the_states_of_a_process(child: tuple[subprocess.Popen[bytes], str]) -> None:
    process, identity = child
    assert fate_of(own_process()) == RUNNING
    assert fate_of(identity) == RUNNING
    stop(process.pid)
    assert fate_of(identity) == STOPPED
    resume(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert fate_of(identity) == GONE


def test_another_process_with_the_same_id() -> None:
    assert fate_of(own_process() + "0") == GONE


NO_NUMBER = f"{own_process().rpartition('/')[0].rpartition('/')[0]}/one/5"


@pytest.mark.parametrize("identity", ["", "another boot/4/1/5", "/1/5", "//1/5", NO_NUMBER])
def test_processes_of_other_hosts(identity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fate_of(identity) == UNKNOWN
    monkeypatch.setattr(process_identity, "_namespace", lambda: "")
    assert fate_of(identity) == UNKNOWN
    assert own_process() == ""


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_a_system_that_does_not_say(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without descriptors left must not take the others for dead."""
    mine = own_process()
    namespace = process_identity._namespace()

    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(process_identity, "open", fail, raising=False)
    monkeypatch.setattr(process_identity, "_namespace", lambda: namespace)
    assert fate_of(mine) == UNKNOWN


def test_a_hidden_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option hidepid of /proc hides the processes of other users."""
    mine = own_process()
    namespace = process_identity._namespace()

    def fail(*_: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(process_identity, "open", fail, raising=False)
    monkeypatch.setattr(process_identity, "_namespace", lambda: namespace)
    assert fate_of(mine) == UNKNOWN
