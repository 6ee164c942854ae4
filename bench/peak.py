"""The largest memory of a tree of processes: python peak.py PID. Prints a line when it has looked once; ends with its
standard input, and prints megabytes: what was there first, and the most since.

A page that several processes share is counted once (proportional set size). Only the standard library, so that it
starts at once and is small; it leaves itself out.
"""

import os
import select
import sys
from pathlib import Path

PAUSE_MS = 2


def resident(root: int) -> float:
    """Megabytes of `root` and all processes below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    total, front = 0.0, [root]
    while front:
        pid = front.pop()
        front += children.get(pid, [])
        if pid != os.getpid():
            total += proportional(pid)
    return total


def proportional(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:  # it has ended
        pass
    return 0.0


def main() -> None:
    root = int(sys.argv[1])
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    first = most = resident(root)
    print("looking", flush=True)
    while not poll.poll(PAUSE_MS):
        most = max(most, resident(root))
    print(first, max(most, resident(root)), flush=True)


if __name__ == "__main__":
    main()
