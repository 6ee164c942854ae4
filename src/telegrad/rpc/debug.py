"""`debug_info`: what a worker is doing, for a program that hangs."""

from telegrad.worker.default_worker import open_worker
from telegrad.worker.diagnostics.debug_info import DebugInfo
from telegrad.worker.diagnostics.snapshot import snapshot

__all__ = ["debug_info"]


def debug_info() -> DebugInfo:
    """Return a snapshot of what this worker is doing.

    It shows queues, requests, peers, references, memory, threads and options. Any thread may call this, also while all
    handlers of the worker are stuck: it takes no lock that they can hold, and makes no call. ``str()`` of the result is
    a text for the terminal.

    Returns:
        The snapshot. Its parts are read one after the other, so they may differ by the work in between.

    Raises:
        RuntimeError: this process has not joined a group (`NotInitialized`).

    Example::

        info = rpc.debug_info()
        print([(peer.name, peer.state, peer.transport) for peer in info.peers])
        print(info)
    """
    return snapshot(open_worker())
