"""Processes that a test stops with SIGSTOP."""

import os
import signal
import time
from pathlib import Path

from telegrad.testing import eventually


def stop(pid: int | None) -> float:
    """Stop a process; return the time of the signal.

    Each thread of it stands still on return. A busy machine may take a while to get to the thread that receives the
    signal, and the others run until then. A process that stands within an operation of a FileStore keeps the lock of
    the file, and the others wait for it: then it goes on for a moment, and is stopped again.
    """
    assert pid is not None
    begun = 0.0

    def stop_without_lock() -> bool:
        nonlocal begun
        begun = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: is_stopped(pid))
        if _has_file_lock(pid):
            resume(pid)
            return False
        return True

    eventually(stop_without_lock)
    return begun


def is_stopped(pid: int | None) -> bool:
    """Return whether each thread of a process stands still."""
    return all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir())


def resume(pid: int | None) -> float:
    """Let a stopped process go on; return the time."""
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    return time.monotonic()


def _has_file_lock(pid: int) -> bool:
    # "1: FLOCK  ADVISORY  WRITE 4711 00:2b:5 0 EOF"; a line of one that waits has "->" before FLOCK.
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(lock[1] == "FLOCK" and lock[4] == str(pid) for lock in locks)


def _is_stopped(task: Path) -> bool:
    try:
        status = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return True
    return status.rpartition(")")[2].split()[0] in "TZX"
