"""Ports for stores and other servers of tests.

A port that the system chooses may be taken again before the server listens: by a connection of another test, or of
another process of pytest. These ports lie below those that the system usually chooses, and each process of pytest has
its own.
"""

import itertools
import os
import socket

_FIRST = 12_000
_PER_PROCESS = 2_000
_PROCESSES = 10

_index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
_offsets = itertools.count(os.getpid())  # the ports of a run that has just ended may not be free yet


def free_port() -> int:
    """Return a TCP port at which nothing listens, another one each time."""
    for offset in itertools.islice(_offsets, _PER_PROCESS):
        port = _FIRST + _index * _PER_PROCESS + offset % _PER_PROCESS
        try:
            with socket.create_server(("localhost", port)):
                return port
        except OSError:
            continue
    raise RuntimeError("no port is free")
