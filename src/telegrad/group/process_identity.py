"""Identity of a process on its host, and the kernel's report of its end.

A process id may be used again, so the identity includes the time at which the process started. Only processes of the
same process namespace can check each other.
"""

import os
import select
from contextlib import suppress

__all__ = ["Fate", "fate_of", "own_process"]

Fate = str
"""State of a process: one of the following."""
RUNNING, STOPPED, GONE, UNKNOWN = "running", "stopped", "gone", "unknown"

_found: list[str] = []  # what `_namespace` has read: it does not change
_EXIT_TIME = 0.5  # s for the kernel to finish the exit of a process that has closed its sockets


def own_process() -> str:
    """Return the identity of this process, "" if the system does not provide it."""
    try:
        found = _facts_of(os.getpid())
    except OSError:
        return ""
    namespace = _namespace()
    return f"{namespace}/{os.getpid()}/{found[1]}" if found is not None and namespace else ""


def fate_of(process: str, has_closed: bool = False) -> Fate:
    """Return the state of a process.

    Args:
        process: Its `own_process`.
        has_closed: Its sockets have closed: if it is exiting, wait until the kernel has finished the exit.

    Returns:
        UNKNOWN for a process of another host or container, or if the system does not say; STOPPED for a process that
        runs no code.
    """
    namespace, _, rest = process.rpartition("/")[0].rpartition("/")
    started = process.rpartition("/")[2]
    if not namespace or namespace != _namespace() or not rest.isdecimal():
        return UNKNOWN
    pid = int(rest)
    try:
        found = _facts_of(pid)
    except OSError:  # for example, this process has no descriptors left
        return UNKNOWN
    if found is None or found[1] != started or found[0] in "ZX":
        return GONE
    if has_closed and pid != os.getpid() and _ends_soon(pid):
        return GONE
    return STOPPED if found[0] in "Tt" else RUNNING


def _ends_soon(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # an old kernel
        return False
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(int(_EXIT_TIME * 1000)))
    finally:
        os.close(handle)


def _namespace() -> str:
    """Return the boot of the host and the process namespace; "" if unknown."""
    if not _found:
        with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as f:
            _found.append(f"{f.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}")
    return _found[0] if _found else ""


def _facts_of(pid: int) -> tuple[str, str] | None:
    """Return the state and the start time of a process; None if it has ended.

    Raises:
        OSError: The system does not say.
    """
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        raise  # it is hidden, as the processes of other users may be
    return fields[0], fields[19]
