"""Proxy of all TCP connections of the soak, which cuts, resets and holds them."""

import contextlib
import random
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

CHUNK = 256 << 10
MOST_BUFFERED = 4 << 20  # bytes of one direction, before the sender is no longer read


@dataclass
class Pipe:
    """Direction of a connection."""

    source: socket.socket
    target: socket.socket
    buffered: bytearray = field(default_factory=bytearray)
    ended: bool = False  # the source has sent everything


@dataclass
class Connection:
    """Connection to a member, and the one that the proxy makes for it."""

    member: str
    pipes: tuple[Pipe, Pipe]

    def sockets(self) -> tuple[socket.socket, socket.socket]:
        return self.pipes[0].source, self.pipes[0].target


class Proxy:
    """Proxy of all members, with one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[socket.socket, tuple[str, int]] = {}
        self._connections: list[Connection] = []
        self._held_until = 0.0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def expose(self, member: str, port: int) -> int:
        """Return the port at which the member is reached from now on."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)
        with self._lock:
            for old in [one for one, (name, _) in self._listeners.items() if name == member]:
                del self._listeners[old]
                old.close()
            self._listeners[listener] = member, port
        return int(listener.getsockname()[1])

    def cut(self, chooser: random.Random, *, reset: bool) -> str | None:
        """Close one connection at both ends; return the member to which it led."""
        with self._lock:
            if not self._connections:
                return None
            chosen = self._connections[chooser.randrange(len(self._connections))]
            self._end(chosen, reset=reset)
            return chosen.member

    def hold(self, seconds: float) -> None:
        """Pass nothing on for some time."""
        self._held_until = time.monotonic() + seconds

    def close(self) -> None:
        self._stopped = True
        self._thread.join()
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            self._end(connection, reset=False)

    # ---- the thread

    def _run(self) -> None:
        while not self._stopped:
            held = self._held_until - time.monotonic()
            if held > 0:
                time.sleep(min(held, 0.05))
                continue
            with self._lock:
                wanted = self._register()
            events = self._selector.select(0.02) if wanted else []
            if not wanted:
                time.sleep(0.02)
            with self._lock:
                ready = {id(key.fileobj): mask for key, mask in events}
                for listener in list(self._listeners):
                    if ready.get(id(listener), 0):
                        self._accept(listener)
                for connection in list(self._connections):
                    self._move(connection, ready)

    def _register(self) -> bool:
        """Wait for what can be done next; returns whether there is anything."""
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        masks: dict[socket.socket, int] = dict.fromkeys(self._listeners, selectors.EVENT_READ)
        for connection in self._connections:
            for pipe in connection.pipes:
                if not pipe.ended and len(pipe.buffered) < MOST_BUFFERED:
                    masks[pipe.source] = masks.get(pipe.source, 0) | selectors.EVENT_READ
                if pipe.buffered:
                    masks[pipe.target] = masks.get(pipe.target, 0) | selectors.EVENT_WRITE
        for one, mask in masks.items():
            self._selector.register(one, mask)
        return bool(masks)

    def _accept(self, listener: socket.socket) -> None:
        member, port = self._listeners[listener]
        try:
            theirs, _ = listener.accept()
        except OSError:
            return
        try:
            ours = socket.create_connection(("127.0.0.1", port), timeout=1)
        except OSError:
            theirs.close()
            return
        for one in (theirs, ours):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.append(Connection(member, (Pipe(theirs, ours), Pipe(ours, theirs))))

    def _move(self, connection: Connection, ready: dict[int, int]) -> None:
        try:
            for pipe in connection.pipes:
                if ready.get(id(pipe.source), 0) & selectors.EVENT_READ and not pipe.ended:
                    data = pipe.source.recv(CHUNK)
                    pipe.buffered += data
                    pipe.ended = not data
                if pipe.buffered:
                    with contextlib.suppress(BlockingIOError):
                        del pipe.buffered[: pipe.target.send(pipe.buffered)]
            if any(pipe.ended and not pipe.buffered for pipe in connection.pipes):
                self._end(connection, reset=False)
        except BlockingIOError:
            pass
        except OSError:
            self._end(connection, reset=True)

    def _end(self, connection: Connection, *, reset: bool) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        for one in connection.sockets():
            if reset:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
