"""Print the peak memory of a tree of processes: python peak.py PID.

It prints a line after the first sample. When its standard input ends, it prints two figures in megabytes: the first
sample and the peak since.

The memory is the private memory of the processes plus all shared memory of the machine (tmpfs and unnamed files), in
which each page counts once. Both are counters of the kernel, so sampling is cheap and finds short peaks. Changes of the
shared memory of other programs count as well. This program uses only the standard library, to start fast and stay
small, and it does not count itself.
"""

import os
import select
import sys
from pathlib import Path

PAUSE_MS = 1


def below(root: int) -> list[int]:
    """Return `root` and all processes below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return [pid for pid in found if pid != os.getpid()]


def resident(pids: list[int]) -> float:
    """Return the megabytes of the processes, shared memory included."""
    return sum(_counter(f"/proc/{pid}/status", "RssAnon:") for pid in pids) + _counter("/proc/meminfo", "Shmem:")


def _counter(file: str, name: str) -> float:
    try:
        for line in Path(file).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:  # the process has ended
        pass
    return 0.0


def main() -> None:
    pids = below(int(sys.argv[1]))
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    first = most = resident(pids)
    print("sampling", flush=True)
    while not poll.poll(PAUSE_MS):
        most = max(most, resident(pids))
    print(first, max(most, resident(pids)), flush=True)


if __name__ == "__main__":
    main()
