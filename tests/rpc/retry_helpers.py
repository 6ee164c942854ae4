"""Broken connections between living workers of this process."""

import os
import socket
import threading

from telegrad import rpc
from telegrad.testing import Cluster, Local

TCP = rpc.Options(transports=("tcp",), tcp_lanes=1, resume=False)
FAST = rpc.Retry(attempts=5, backoff=0.001, max_backoff=0.01)


def break_connections() -> int:
    """Shut down all established TCP connections of this process; return their number.

    A connection that a worker makes meanwhile, perhaps with a descriptor of one that it has closed, stays open.
    """
    count = 0
    before = {name: inode_of(name) for name in os.listdir("/proc/self/fd")}
    for name, inode in before.items():
        if not inode.startswith("socket:") or inode_of(name) != inode:
            continue
        try:
            with socket.socket(fileno=os.dup(int(name))) as found:
                if inode_of(str(found.fileno())) != inode:
                    continue
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    found.getpeername()
                    found.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:  # closed meanwhile, or a listener
            continue
    return count


def inode_of(descriptor: str) -> str:
    """Return what a descriptor refers to; empty if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


class Counted:
    """Function that counts its runs, and waits in each until the test goes on."""

    def __init__(self) -> None:
        self.runs = 0
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.local = Local(self)

    def wait_for_begin(self) -> None:
        assert self.begun.acquire(timeout=10)


def counted(local: Local[Counted], x: object = None) -> tuple[int, object]:
    of = local.value
    of.runs += 1
    of.begun.release()
    assert of.go_on.wait(10)
    return of.runs, x


def restart(group: Cluster, rank: int) -> None:
    """Replace a worker of a dynamic group by a new one of its name."""
    old = group.workers[rank]
    old.shutdown(graceful=False)
    group.workers[rank] = rpc.Worker(old.info.name, store=group.store)
