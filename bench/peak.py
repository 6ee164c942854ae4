"""The largest memory of a tree of processes: python peak.py PID. Prints a line when it has looked once; ends with its
standard input, and prints megabytes: what was there first, and the most since.

Memory is what the processes have of their own, and what the machine has of shared memory (tmpfs and files without a
name), where each page counts once however many have mapped it, or none. Both are counters that the kernel keeps, so a
look takes no time and short peaks are seen; but shared memory of other programs counts as well, when it changes
meanwhile. Only the standard library, so that it starts at once and is small; it leaves itself out.
"""

import os
import select
import sys
from pathlib import Path

PAUSE_MS = 1


def below(root: int) -> list[int]:
    """`root` and all processes below it."""
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
    """Megabytes of the processes, shared memory included."""
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
    print("looking", flush=True)
    while not poll.poll(PAUSE_MS):
        most = max(most, resident(pids))
    print(first, max(most, resident(pids)), flush=True)


if __name__ == "__main__":
    main()
