"""Bare socket as a peer: an attacker, a port scanner or a broken program."""

import hmac
import itertools
import os
import socket
import struct
from typing import Any, Self

from telegrad.rpc import Options, Worker

MAGIC = 0x31524754
VERSION = 15
HELLO, CHALLENGE, PROOF, WELCOME, REFUSE, ANSWER, CONFIRM = 1, 2, 3, 4, 5, 6, 7
REQUEST, REPLY, ONEWAY, CREDIT, GOODBYE = 16, 17, 18, 19, 20
CANCEL, CALL_STATE = 22, 23

_HEADER = struct.Struct("<IBBHIIQIIQqQ")  # see csrc/core/message.h
TIMEOUT = 20.0


def frame(kind: int, body: bytes = b"", *, size: int | None = None, magic: int = MAGIC, **fields: int) -> bytes:
    """Return a frame; `size` is the size of the body in its header."""
    header = _HEADER.pack(
        magic,
        kind,
        fields.get("tag", 0),
        fields.get("flags", 0),
        fields.get("name_id", 0),
        fields.get("name_size", 0),
        len(body) if size is None else size,
        fields.get("segments", 0),
        fields.get("depth", 0),
        fields.get("call", 0),
        fields.get("timeout", 0),
        fields.get("credit", 0),
    )
    return header + body


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(data)) + data


def identity(worker_id: int, name: str, incarnation: int) -> bytes:
    return struct.pack("<i", worker_id) + text(name) + struct.pack("<Q", incarnation)


_incarnations = itertools.count(1)
_dials = itertools.count(1)


def member(worker_id: int, name: str) -> tuple[int, str, int]:
    """Return the identity of a new worker: one that has left cannot come back."""
    return worker_id, name, next(_incarnations)


def reachable(**options: Any) -> Options:
    """Return options of a worker that raw peers can reach over TCP and Unix sockets."""
    return Options(transports=tuple(dict.fromkeys((*Options().transports, "unix", "tcp"))), **options)


class RawPeer:
    """Connection to a worker's address.

    Args:
        target: The worker.
        transport: "tcp" or "unix".
    """

    def __init__(self, target: Worker, transport: str) -> None:
        self.core = target._worker
        address = next(a for a in self.core.member.addresses if a.startswith(transport + ":"))
        where = address.partition(":")[2]
        self.socket = socket.socket(socket.AF_UNIX if transport == "unix" else socket.AF_INET)
        self.socket.settimeout(TIMEOUT)
        if transport == "unix":
            self.socket.connect("\0" + where[1:])
        else:
            host, _, port = where.rpartition(":")
            self.socket.connect((host, int(port)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send as much as the peer accepts."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def receive(self) -> tuple[int, bytes]:
        """Receive one frame."""
        kind, _, body = self.receive_call()
        return kind, body

    def receive_call(self) -> tuple[int, int, bytes]:
        """Receive one frame; return its type, the number of its call, and its body."""
        header = _HEADER.unpack(self._exactly(_HEADER.size))
        self._exactly(header[5])  # the name of the function
        return header[1], header[9], self._exactly(header[6])

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def ended(self) -> list[tuple[int, bytes]]:
        """Wait until the peer closes; return the frames before."""
        frames = []
        try:
            while True:
                frames.append(self.receive())
        except (EOFError, ConnectionResetError):
            return frames

    # ---- the handshake, as csrc/core/handshake.h describes it

    def hello(self, me: tuple[int, str, int], group: str | None = None, nonce: bytes | None = None) -> bytes:
        """Return the body of the first frame."""
        core = self.core
        return (
            struct.pack("<I", VERSION)
            + text(group or core.group.token)
            + identity(*me)
            + identity(core.info.id, core.info.name, core.incarnation)
            + text(nonce or os.urandom(32))
            + struct.pack("<QQIIIQ", 256 << 20, 256 << 30, 1 << 20, 1 << 16, 1 << 16, 16 << 30)  # limits
            + struct.pack("<IB", 1, 0)  # lanes; its sessions end with their connections
            + struct.pack("<QBQ", next(_dials), 0, 0)  # the offered session, after none
            + struct.pack("<B", 0)  # the purpose: a session
            + text(b"")  # the link, of a lane
        )

    def proof(self, hello: bytes, challenge: bytes, secret: bytes | None = None) -> bytes:
        """Return the body of the third frame."""
        return self.mac(b"initiator", text(hello) + challenge, secret)

    def mac(self, label: bytes, transcript: bytes, secret: bytes | None = None) -> bytes:
        return text(hmac.digest(secret or self.core.group.secret, label + transcript, "sha256"))

    def join(self, me: tuple[int, str, int], secret: bytes | None = None) -> int:
        """Make the complete handshake; return the type of the last frame."""
        hello = self.hello(me)
        self.send(frame(HELLO, hello))
        kind, challenge = self.receive()
        if kind != CHALLENGE:
            return kind
        self.send(frame(PROOF, self.proof(hello, challenge, secret)))
        kind, answer = self.receive()
        if kind != ANSWER:
            return kind
        self.send(frame(CONFIRM, self.confirmation(hello, challenge, answer)))
        return self.receive()[0]

    def confirmation(self, hello: bytes, challenge: bytes, answer: bytes) -> bytes:
        """Return the body of the fifth frame."""
        (size,) = struct.unpack_from("<I", answer)
        received = struct.pack("<Q", 0)
        return received + self.mac(b"confirm", text(text(text(hello) + challenge) + answer[: 4 + size]) + received)


class Bomb:
    """Value that creates a file when unpickled."""

    def __init__(self, path: Any) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")
