"""Access to the group's store over a Unix socket, for workers on the store's host.

Rank 0 hosts a `TCPStore`. For each connection, that store resolves the names of both addresses. This takes
milliseconds, and seconds if the resolver drops queries that arrive in a burst, as those of a starting group do. So the
host also listens on a Unix socket (`UnixStoreServer`). Workers of the same host (`LocalStore`) use that instead.
All data is in the one store behind it, so workers of other hosts, which connect to the port, see the same keys.

The socket has an abstract name made from the port, which only one process of a network namespace can bind. Each end
checks that the other belongs to the same user. A message is a byte for its kind, followed by fields with length
prefixes. There are only the operations that a group uses. A read waits at the client for its key, as a `TCPStore` does.

A server greets each client with its random id. A client drops its connection after each timeout, and connects again
with its next operation, but only to the same server: the next group's store may have the port by then.

The file is longer than others, because it has both ends of the protocol.
"""

import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from telegrad.group.store_waits import Store, StoreGone, StoreUnresponsive, find

__all__ = ["LocalStore", "UnixStoreServer", "close_servers", "request_release"]

logger: logging.Logger = logging.getLogger("telegrad")

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as _Store
else:
    from torch.distributed import Store as _Store

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_MAX_MESSAGE = 1 << 28  # bytes of a message
_ID_LENGTH = 16  # bytes of a server's id
_HELLO = b"telegrad store 6"
_OK, _FAILED = 0, 1
_SET, _GET, _COMPARE_SET, _ADD, _CHECK, _WAIT, _RELEASE_PORT, _DELETE, _FIND = range(9)
_MISSING, _FOUND = b"0", b"1"  # first byte of a value that `_FIND` returns
# Interval of checks for keys written by workers of other hosts. It grows while none arrives.
_MIN_PAUSE, _MAX_PAUSE = 0.002, 0.05  # s
_TIMEOUT = 1.0  # s for a reply to a request for the port


def _name_of(port: int) -> str:
    return f"\0telegrad-store-{port}"


def _message(kind: int, fields: Iterable[bytes]) -> bytes:
    body = bytes([kind]) + b"".join(_LENGTH.pack(len(field)) + field for field in fields)
    return _LENGTH.pack(len(body)) + body


def _fields(body: bytes) -> list[bytes]:
    found, at = [], 1
    while at < len(body):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if at + length > len(body):
            raise ValueError("a field is longer than its message")
        found.append(body[at : at + length])
        at += length
    return found


def _is_same_user(s: socket.socket) -> bool:
    credentials = s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


class _ClientSession:
    """Session of one client."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.received = bytearray()
        self.unsent = b""
        self.blocked = False  # waits for room for the rest of a reply
        self.missing: set[str] = set()  # the keys for which it waits
        self.wanted: list[str] = []  # the keys whose values it reads


_ending: dict[int, threading.Thread] = {}  # threads of servers that are closing, by port
_open: "weakref.WeakSet[UnixStoreServer]" = weakref.WeakSet()


def close_servers(seconds: float) -> None:
    """Close the servers of this process, and wait for their threads.

    Runs at interpreter exit, after the workers are closed. A daemon thread that is inside torch's store when the
    interpreter exits crashes the process.

    Args:
        seconds: Limit of the wait.
    """
    for server in list(_open):
        server.close_later()
    until = time.monotonic() + seconds
    for thread in list(_ending.values()):
        thread.join(max(0.0, until - time.monotonic()))


class UnixStoreServer:
    """Server of a store for the clients of this host, with its own thread.

    Args:
        port: of the store behind it.

    Raises:
        OSError: a process of this host has bound the socket of this port already.
    """

    def __init__(self, port: int) -> None:
        before = _ending.pop(port, None)
        if before is not None:
            before.join()
        self._port = port
        self._id = secrets.token_bytes(_ID_LENGTH)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listening.bind(_name_of(port))
        except OSError:
            self._listening.close()
            raise
        self._listening.listen(4096)
        self._listening.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._sessions: set[_ClientSession] = set()
        self._thread: threading.Thread | None = None
        self._store: Store | None = None
        self._release_port: Callable[[], bool] = lambda: False
        self._poll_interval = _MIN_PAUSE
        self._fd_limit_hit = False  # out of file descriptors, and logged
        self._stopped = False

    def open(self, store: Store, release_port: Callable[[], bool] | None = None) -> None:
        """Start serving clients.

        Args:
            store: the store behind the server.
            release_port: called when another process asks for the port; returns whether it can have it.
        """
        self._store = store
        if release_port is not None:
            self._release_port = release_port
        self._thread = threading.Thread(target=self._serve, name="telegrad-store", daemon=True)
        self._thread.start()
        _open.add(self)

    def close(self) -> None:
        """Close all sessions and wait for the thread. The store stays open."""
        self._wake.close()
        if self._thread is not None:
            self._thread.join()
        else:
            self._release()

    def close_later(self) -> None:
        """Stop accepting; the thread closes all sessions and ends.

        Neither blocks nor logs, so finalizers may call it.
        """
        if self._thread is not None:
            _ending[self._port] = self._thread
        self._stopped = True
        with suppress(OSError):  # the thread has ended and closed its sockets
            self._listening.shutdown(socket.SHUT_RDWR)
        self._wake.close()

    def detach_after_fork(self) -> None:
        """Close the parent's sockets in a forked child, which has no thread."""
        for s in (self._listening, self._wake, self._woken, *(session.link for session in list(self._sessions))):
            s.close()

    def _release(self) -> None:
        for s in (self._listening, self._woken, *(session.link for session in self._sessions)):
            s.close()
        self._sessions.clear()
        self._store = None

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            self._poll_interval = _MIN_PAUSE
            while True:
                waited_for = any(session.missing for session in self._sessions)
                ready = selector.select(self._poll_interval if waited_for else None)
                if not ready:
                    self._poll_interval = min(2 * self._poll_interval, _MAX_PAUSE)
                    self._reply_to_waiting(selector)
                for key, events in ready:
                    if key.fileobj is self._woken:
                        self._release()
                        return
                    if key.fileobj is self._listening:
                        self._accept(selector)
                    elif key.data in self._sessions:
                        self._on_session_event(selector, key.data, events)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        while True:
            try:
                link, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if self._stopped:
                    return
                if not self._fd_limit_hit:
                    logger.warning("the group's store cannot accept another worker of this host: %s", e)
                self._fd_limit_hit = True
                time.sleep(_MAX_PAUSE)  # the connections stay in the backlog
                return
            self._fd_limit_hit = False
            if not _is_same_user(link):
                link.close()
                continue
            link.setblocking(False)
            session = _ClientSession(link)
            self._sessions.add(session)
            selector.register(link, selectors.EVENT_READ, session)
            self._send(selector, session, _message(_OK, [_HELLO, self._id]))

    def _on_session_event(self, selector: selectors.BaseSelector, session: _ClientSession, events: int) -> None:
        """Handle a session's event: data, room for a reply, or end of connection."""
        if events & selectors.EVENT_WRITE:
            self._send(selector, session, b"")
            return
        try:
            received = session.link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._close_session(selector, session)
            return
        session.received += received
        while session in self._sessions and len(session.received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(session.received)
            if not 0 < length <= _MAX_MESSAGE:
                self._close_session(selector, session)
                return
            if len(session.received) < _LENGTH.size + length:
                return
            body = bytes(session.received[_LENGTH.size : _LENGTH.size + length])
            del session.received[: _LENGTH.size + length]
            self._on_request(selector, session, body)

    def _on_request(self, selector: selectors.BaseSelector, session: _ClientSession, body: bytes) -> None:
        touched: Sequence[str] = ()
        try:
            answer, touched = self._execute(session, body[0], _fields(body))
        except Exception as e:  # an error of the store, or a malformed request: reply with it
            answer = _message(_FAILED, [str(e).encode()])
        if answer is not None:
            self._send(selector, session, answer)
        if touched:
            self._reply_to_waiting(selector, set(touched))

    def _execute(self, session: _ClientSession, kind: int, fields: list[bytes]) -> tuple[bytes | None, Sequence[str]]:
        """Return the reply, or None if it has to wait, and the written keys."""
        store = self._store
        assert store is not None
        keys = [field.decode() for field in (fields if kind in (_GET, _CHECK, _WAIT, _FIND) else fields[:1])]
        if kind == _SET:
            store.set(keys[0], fields[1])
            return _message(_OK, []), keys
        if kind == _COMPARE_SET:
            return _message(_OK, [store.compare_set(keys[0], *fields[1:3])]), keys
        if kind == _ADD:
            return _message(_OK, [b"%d" % store.add(keys[0], int(fields[1]))]), keys
        if kind == _FIND:
            values = find(store, keys)
            return _message(_OK, [_MISSING if value is None else _FOUND + value for value in values]), ()
        if kind == _DELETE:
            return _message(_OK, [b"1" if store.delete_key(keys[0]) else b""]), ()
        if kind == _RELEASE_PORT:
            return _message(_OK, [b"1" if self._release_port() else b""]), ()
        if kind == _CHECK:
            return _message(_OK, [b"1" if store.check(keys) else b""]), ()
        if kind not in (_GET, _WAIT):
            raise ValueError(f"unknown operation {kind}")
        session.wanted = keys if kind == _GET else []
        session.missing = set() if store.check(keys) else {key for key in keys if not store.check([key])}
        self._poll_interval = _MIN_PAUSE
        return None if session.missing else self._wanted(session), ()

    def _wanted(self, session: _ClientSession) -> bytes:
        """Return the values that a session reads; its keys exist."""
        assert self._store is not None
        return _message(_OK, self._store.multi_get(session.wanted) if session.wanted else [])

    def _reply_to_waiting(self, selector: selectors.BaseSelector, written: set[str] | None = None) -> None:
        """Reply to sessions that wait for keys which exist now: the written ones, or any."""
        assert self._store is not None
        here: dict[str, bool] = {}
        for session in list(self._sessions):
            missing = session.missing
            if not missing or (written is not None and not missing & written):
                continue
            try:
                for key in list(missing if written is None else missing & written):
                    if key not in here:
                        here[key] = bool(self._store.check([key]))
                    if not here[key]:
                        if written is None:
                            break
                        continue
                    missing.discard(key)
                if missing:
                    continue
                reply = self._wanted(session)
            except Exception as e:
                reply = _message(_FAILED, [str(e).encode()])
            session.missing = set()
            self._send(selector, session, reply)

    def _send(self, selector: selectors.BaseSelector, session: _ClientSession, more: bytes) -> None:
        session.unsent += more
        try:
            sent = session.link.send(session.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close_session(selector, session)
            return
        was_blocked, session.blocked = session.blocked, sent < len(session.unsent)
        session.unsent = session.unsent[sent:]
        if session.blocked != was_blocked:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if session.blocked else 0)
            selector.modify(session.link, events, session)

    def _close_session(self, selector: selectors.BaseSelector, session: _ClientSession) -> None:
        self._sessions.discard(session)
        selector.unregister(session.link)
        session.link.close()


class _Owner(Protocol):
    """Host of a store, for the clients in its own process."""

    def adopt(self, store: "LocalStore") -> None:
        """Live as long as this client of the store."""


class LocalStore(_Store):
    """Client of the store on this host; a c10d ``Store`` for one process.

    Args:
        host: name of the store's host.
        port: of the store.
        timeout: limit of waits for keys and for replies of the host.

    Raises:
        ConnectionRefusedError: no process of this user serves a store for this port.
        ConnectionError: the host closed the connection.
    """

    timeout: timedelta  # an attribute of torch's class that its stub lacks

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        super().__init__()
        self.host: str = host
        self.port: int = port
        self.keep_alive: _Owner | None = None  # the host that must live as long as this client
        self.set_timeout(timeout)
        self._lock = threading.Lock()
        self._server = b""  # id of the server
        self._link: socket.socket | None = self._connect()

    def connect_again(self, seconds: float) -> "LocalStore":
        """Return a client of the server that has the port now.

        Args:
            seconds: Limit in seconds.

        Raises:
            OSError: There is none.
        """
        store = LocalStore(self.host, self.port, timedelta(seconds=seconds))
        store.set_timeout(self.timeout)
        if self.keep_alive is not None:
            self.keep_alive.adopt(store)
        return store

    def _connect(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(self.timeout.total_seconds())
            link.connect(_name_of(self.port))
            if not _is_same_user(link):
                raise ConnectionRefusedError("the Unix socket of the store belongs to another user")
            greeting = _fields(_receive(link))
            if greeting[:1] != [_HELLO] or len(greeting) != 2:
                raise ConnectionRefusedError("the Unix socket of the store has another protocol")
            if self._server not in (b"", greeting[1]):
                raise StoreGone(f"the group's store at port {self.port} has ended, and another one has its port")
            self._server = greeting[1]
        except BaseException:
            link.close()
            raise
        return link

    def _request(self, kind: int, *fields: bytes, timeout: timedelta | None = None) -> list[bytes]:
        limit = (timeout or self.timeout).total_seconds()
        with self._lock:
            sent = False
            try:
                if self._link is None:
                    self._link = self._connect()
                link, self._link = self._link, None  # an error leaves the connection within a message
                link.settimeout(limit)
                link.sendall(_message(kind, fields))
                sent = True
                body = _receive(link)
            except TimeoutError as e:
                if sent and kind in (_GET, _WAIT):
                    raise dist.DistStoreError("the store timed out waiting for keys") from e
                limit = limit if sent else self.timeout.total_seconds()
                raise StoreUnresponsive(f"the host of the group's store has not replied within {limit:.3g} s") from e
            except OSError as e:
                raise StoreGone(f"the host of the group's store closed the connection: {e}") from e
            self._link = link
        answer = _fields(body)
        if body[0] != _OK:
            raise dist.DistStoreError(answer[0].decode())
        return answer

    def set(self, key: str, value: str | bytes) -> None:
        self._request(_SET, key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.read_within(keys, self.timeout)

    def read_within(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        """Return the values of keys once all of them are written."""
        return self._request(_GET, *(key.encode() for key in keys), timeout=timeout)

    def has_extended_api(self) -> bool:  # for `multi_get`: a list of members is one message
        return True

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._request(_COMPARE_SET, key.encode(), _bytes(expected), _bytes(desired))[0]

    def add(self, key: str, number: int) -> int:
        return int(self._request(_ADD, key.encode(), b"%d" % number)[0])

    def find_now(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys, read in this order, with None for a missing key."""
        answer = self._request(_FIND, *(key.encode() for key in keys))
        return [value[1:] if value[:1] == _FOUND else None for value in answer]

    def delete_key(self, key: str) -> bool:
        return bool(self._request(_DELETE, key.encode())[0])

    deleteKey = delete_key  # the name by which torch's stores call it from C++

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request(_CHECK, *(key.encode() for key in keys))[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._request(_WAIT, *(key.encode() for key in keys), timeout=timeout)


def request_release(port: int) -> None:
    """Ask the process that serves a port to end its store if its group is over."""
    with suppress(OSError, RuntimeError):  # it belongs to another user, or is closing
        LocalStore("localhost", port, timedelta(seconds=_TIMEOUT))._request(_RELEASE_PORT)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _receive(link: socket.socket) -> bytes:
    """Return the next message; the socket's timeout applies to all of it.

    The peer sends no other message until it is asked.
    """
    timeout = link.gettimeout()
    until = None if timeout is None else time.monotonic() + timeout
    received = bytearray()
    wanted = _LENGTH.size
    while len(received) < wanted:
        if received and until is not None:
            link.settimeout(max(until - time.monotonic(), 1e-3))
        more = link.recv(1 << 16)
        if not more:
            raise ConnectionResetError("the connection was closed")
        received += more
        if wanted == _LENGTH.size <= len(received):
            wanted += _LENGTH.unpack_from(received)[0]
    return bytes(received[_LENGTH.size :])
