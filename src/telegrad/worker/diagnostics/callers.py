"""Callers of running requests.

The scope of a request has its connection but not its caller. The core passes both on only with messages that Python
handles, so a caller that has sent none of them is unknown.
"""

from collections.abc import Callable

__all__ = ["Callers"]

_MOST = 4096  # connections; more than a worker has at once


class Callers:
    """Peers by connection.

    Args:
        name_of: Returns a worker's name by its id.
    """

    def __init__(self, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self._peers: dict[int, int] = {}

    def add(self, connection: int, peer: int) -> None:
        """Record the peer of a connection. Any thread may call this."""
        peers = self._peers
        if connection not in peers:
            if len(peers) >= _MOST:
                peers.clear()
            peers[connection] = peer

    def name_of(self, connection: int) -> str | None:
        """Return the name of a connection's peer; None if it is not known."""
        peer = self._peers.get(connection)
        return None if peer is None else self._name_of(peer)
