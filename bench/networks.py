"""Two network namespaces with a cable between them, plain or shaped.

A namespace lives as long as a process is in it: each is made by a child that does nothing else and is killed with its
parent, so nothing stays behind, whatever happens to the bench.
"""

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from bench.competitors.base import Place
from bench.processes import fork

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("bench0", "bench1")
LATENCY = "25ms"  # how long a shaped cable may hold a packet before it drops it


def missing() -> str | None:
    """Return why namespaces cannot be created; None if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: apt install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with cable():
            return None
    except (OSError, RuntimeError) as e:
        return f"network namespaces cannot be made: {e}"


def enter(pid: int) -> None:
    """Move this single-threaded process into the network namespace of another."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


@contextmanager
def cable(gigabits: float | None = None) -> Iterator[tuple[Place, Place]]:
    """Create two namespaces with a veth pair, optionally with a rate limit.

    Raises:
        OSError: This machine does not allow a step.
        RuntimeError: This machine does not allow a step.
    """
    holders = [_namespace(), _namespace()]
    try:
        _in(holders[0], "ip", "link", "add", INTERFACES[0], "type", "veth", "peer", "name", INTERFACES[1])
        _in(holders[0], "ip", "link", "set", INTERFACES[1], "netns", str(holders[1]))
        for pid, interface, address in zip(holders, INTERFACES, ADDRESSES, strict=True):
            _in(pid, "ip", "link", "set", "lo", "up")
            _in(pid, "ip", "address", "add", f"{address}/24", "dev", interface)
            _in(pid, "ip", "link", "set", interface, "up")
            if gigabits is not None:
                burst = str(int(max(256e3, gigabits * 1e9 / 8 * 1e-3)))  # a millisecond of it, and whole segments
                shape = ("rate", f"{gigabits}gbit", "burst", burst, "latency", LATENCY)
                _in(pid, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *shape)
        first, second = (
            Place(pid, address, interface)
            for pid, address, interface in zip(holders, ADDRESSES, INTERFACES, strict=True)
        )
        yield first, second
    finally:
        for pid in holders:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _namespace() -> int:
    """Start a process in a new network namespace and return its pid."""
    ready, tell = os.pipe()

    def hold() -> None:
        if _libc.unshare(_CLONE_NEWNET):
            os.write(tell, os.strerror(ctypes.get_errno()).encode())
            return
        os.write(tell, b".")
        while True:
            signal.pause()

    pid = fork(hold)
    os.close(tell)
    answer = os.read(ready, 200).decode()
    os.close(ready)
    if answer != ".":
        os.waitpid(pid, 0)
        raise RuntimeError(f"unshare: {answer}")
    return pid


def _in(pid: int, *command: str) -> None:
    done = subprocess.run(("nsenter", "-t", str(pid), "-n", *command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
