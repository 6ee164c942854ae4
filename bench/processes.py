"""Processes that end with their parent.

The bench forks all groups from one process that has imported PyTorch and started no thread, so a group starts in a
fraction of a second. All other processes that a competitor starts, including detached daemons, stay descendants of the
group's leader, because the leader adopts orphans. So they can be found, counted and ended.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import psutil

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_TIMEOUT = 20.0  # s until killed processes have ended


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends.

    Args:
        parent: the parent's pid, as the parent knows it: the parent may have ended before this is called.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def fork(body: Callable[[], object], errors: Path | None = None) -> int:
    """Run `body` in a child and return its pid.

    The child exits with 0, or with 1 if `body` raised. `errors` gets the child's standard streams; without it the child
    shares those of this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run(body, errors, parent)
    return pid


def _run(body: Callable[[], object], errors: Path | None, parent: int) -> NoReturn:
    status = 1
    try:
        end_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if errors is not None:
            opened = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, 1)
            os.dup2(opened, 2)
            os.close(opened)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        body()
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int, seconds: float) -> int | None:
    """Return the exit status of a child, or None if it still runs after `seconds`.

    A negative status is the signal that killed the child.
    """
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(seconds, 0) * 1000):
            return None
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def descendants(root: int) -> list[int]:
    """List every process below `root` that has not ended."""
    try:
        below = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in below if _alive(child)]


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_descendants(keep: Collection[int] = ()) -> None:
    """Kill every descendant of this process and wait for its end.

    Processes in `keep`, and their descendants, keep running.

    Raises:
        RuntimeError: A process does not end.
    """
    until = time.monotonic() + _END_TIMEOUT
    while True:
        kept = {one for root in keep for one in (root, *descendants(root))}
        rest = [pid for pid in descendants(os.getpid()) if pid not in kept]
        for pid in rest:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not rest:
            return _reap()
        if time.monotonic() > until:
            raise RuntimeError(f"these processes do not end: {rest}")
        time.sleep(0.01)


def _reap() -> None:
    """Reap every child that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """End all processes started inside, also after SIGTERM or an error."""
    adopt_orphans()

    def terminated(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        end_descendants()


class Meter:
    """Processor time that some processes use from now on, threads that end included.

    Looking for processes takes milliseconds. That time is not counted: the first search ends before the clocks are
    read, and new processes are searched for after the clocks have been read again.

    Args:
        find: returns the processes.
        but_here: exclude the measuring thread.
    """

    def __init__(self, find: Callable[[], Collection[int]], but_here: bool = False) -> None:
        self._find, self._but_here = find, but_here
        self._before = _read(self._clocks())

    def seconds(self) -> float:
        after = _read(self._before)
        later = _read(self._clocks() - self._before.keys())
        return sum(after[clock] - self._before[clock] for clock in after) + sum(later.values())

    def _clocks(self) -> set[int]:
        pids = set(self._find())
        threads: set[int] = set()
        if self._but_here and os.getpid() in pids:
            pids.remove(os.getpid())
            threads = {int(entry) for entry in os.listdir("/proc/self/task")} - {threading.get_native_id()}
        # As clock_getcpuclockid(3) makes them, and pthread_getcpuclockid(3) for threads of this process.
        return {(~pid << 3) | 2 for pid in pids} | {(~thread << 3) | 6 for thread in threads}


def _read(clocks: Collection[int]) -> dict[int, float]:
    found = {}
    for clock in clocks:
        try:
            found[clock] = time.clock_gettime(clock)
        except OSError:  # it has ended
            pass
    return found
