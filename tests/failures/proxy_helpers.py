"""TCP proxy between two workers whose connections a test can break."""

import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from telegrad.rpc import Options
from telegrad.testing import Cluster, cluster

_HARD = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


class Flow:
    """Direction of a connection through the proxy.

    Nothing blocks: while an end of one connection reads nothing, the others go on, as they do in a network.
    """

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self._source = source
        self._target = target
        self._data = memoryview(b"")  # read, and not yet written

    @property
    def waits_for(self) -> tuple[socket.socket, int]:
        """The socket that the flow waits for, and the event."""
        if self._data:
            return self._target, selectors.EVENT_WRITE
        return self._source, selectors.EVENT_READ

    def go_on(self) -> bool:
        """Pass data on, as far as it goes at once; return whether both ends are open."""
        try:
            if not self._data:
                self._data = memoryview(self._source.recv(1 << 18))
                if not self._data:
                    return False
            self._data = self._data[self._target.send(self._data) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


class Route:
    """A connection through the proxy."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.ends = source, target
        self.flows = Flow(source, target), Flow(target, source)
        for end in self.ends:
            end.setblocking(False)

    def reset(self) -> None:
        """Reset the connection at both ends."""
        for end in self.ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HARD)
            end.close()


class Proxy:
    """Proxy that passes on what two ends of a connection send each other."""

    def __init__(self) -> None:
        self.target = ("", 0)
        """Where connections go."""
        self.accepted = 0
        self.open = True
        """Whether new connections are passed on; otherwise they are closed at once."""
        self.frozen = False
        """Whether nothing is passed on, as in a network that has failed."""
        self._routes: list[Route] = []
        self._lock = threading.Lock()
        self._ends = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.005)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port to connect to."""
        return int(self._listener.getsockname()[1])

    def freeze(self) -> None:
        """Pass nothing on any more: what is sent from now on does not arrive."""
        self.frozen = True
        with self._lock:  # the thread may be passing on
            pass

    def reset(self) -> int:
        """Reset all connections at both ends; return their number."""
        with self._lock:
            routes, self._routes = self._routes, []
            for route in routes:
                route.reset()
        return len(routes)

    @property
    def routes(self) -> int:
        """Number of connections."""
        return len(self._routes)

    def reset_one(self, index: int) -> None:
        """Reset one connection at both ends, the oldest has the index 0."""
        with self._lock:
            self._routes.pop(index).reset()

    def close(self) -> None:
        """End the proxy and its connections."""
        self._ends = True
        self._thread.join()
        self.reset()
        self._listener.close()

    def _run(self) -> None:
        while not self._ends:
            try:
                source, _ = self._listener.accept()
            except TimeoutError:
                pass
            else:
                self.accepted += 1
                if self.open:
                    with self._lock:
                        self._routes.append(Route(source, socket.create_connection(self.target)))
                else:
                    source.close()
            if not self.frozen:
                self._pass_on()

    def _pass_on(self) -> None:
        with self._lock:
            for _ in range(20):
                waiting: dict[socket.socket, list[tuple[int, Route, Flow]]] = {}
                for route in self._routes:
                    for flow in route.flows:
                        end, event = flow.waits_for
                        waiting.setdefault(end, []).append((event, route, flow))
                with selectors.DefaultSelector() as selector:
                    for end, flows in waiting.items():
                        selector.register(end, sum(event for event, _, _ in flows), flows)
                    ready = selector.select(0.005)
                if not ready:
                    return
                for key, events in ready:
                    for event, route, flow in key.data:
                        if event & events and route in self._routes and not flow.go_on():
                            self._routes.remove(route)
                            for end in route.ends:
                                end.close()  # what has been passed on still arrives


def address_of(cluster: Cluster, index: int) -> str:
    """Return the TCP address of a worker, which may be encrypted."""
    return next(a for a in cluster[index]._worker.member.addresses if a.startswith(("tcp:", "tls:")))


@contextmanager
def proxied(options: Options, graceful: bool = True) -> Iterator[tuple[Cluster, Proxy]]:
    """Start two workers; the first reaches the second through a proxy."""
    proxy = Proxy()  # before the group, whose end finds descriptors that are left over
    try:
        with cluster(2, options, graceful=graceful) as group:
            scheme, _, where = address_of(group, 1).partition(":")
            host, _, port = where.rpartition(":")
            proxy.target = host, int(port)
            peer, addresses = group[1]._worker, [f"{scheme}:127.0.0.1:{proxy.port}"]
            group[0]._worker.engine.set_peer(peer.info.id, peer.info.name, peer.incarnation, addresses)
            assert group[0].rpc_sync("w1", abs, (-1,)) == 1
            assert proxy.accepted == 1
            yield group, proxy
    finally:
        proxy.close()
