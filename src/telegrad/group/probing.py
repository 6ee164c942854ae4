"""Check of what listens at a store's port: a store, another program, or nothing."""

import secrets
import socket
import struct
import time
from typing import Any

from telegrad.errors import TelegradError

__all__ = ["plain", "probe"]

# First message of torch's store clients: VALIDATE with its magic number, and PING. The store replies with the number.
_VALIDATE, _PING, _MAGIC = 0, 13, 0x3C85F7CE
_HELLO = struct.Struct("<BIBI")
_NUMBER = struct.Struct("<I")
_TIMEOUT = 5.0  # s for one probe at most; a busy store may need as long
_HINT_AFTER = 1.0  # s until a line is sent, for servers that wait for one
_SHOWN = 60  # bytes of another program's reply


def plain(host: str) -> Any:
    """Return the host as bytes, for which `socket` imports no Unicode tables."""
    return host.encode() if host.isascii() else host


def probe(host: str, port: int, timeout: float) -> str:
    """Check whether a store listens at an address.

    Returns:
        "" if one does, else the reason.

    Raises:
        TelegradError: another program listens there.
    """
    timeout = min(timeout, _TIMEOUT)
    until = time.monotonic() + timeout
    number = secrets.randbits(32)
    try:
        with socket.create_connection((plain(host), port), timeout=timeout) as link:
            link.sendall(_HELLO.pack(_VALIDATE, _MAGIC, _PING, number))
            answer = _answer(link, until)
    except TimeoutError:
        return "no answer"
    except OSError as e:
        return (e.strerror or str(e)).lower()
    if answer == _NUMBER.pack(number):
        return ""
    if not answer:
        return "the port is open, but its program does not reply as a store does"
    other = "an HTTP server" if answer.startswith(b"HTTP/") or b"<!doctype" in answer.lower() else "another program"
    raise TelegradError(
        f"the program at {host}:{port} is not the store of a group, but {other}: it replies {answer!r}."
        " Give the group (MASTER_PORT, or init_method) a port that is free on the host of rank 0."
    )


def _answer(link: socket.socket, until: float) -> bytes:
    """Return the peer's reply; b"" if there is none in time or the peer hangs up."""
    link.settimeout(min(_HINT_AFTER, max(until - time.monotonic(), 0.001)))
    try:
        reply = link.recv(_SHOWN)
    except TimeoutError:
        # A store would have replied. A line-based server such as HTTP still waits for the end of a line.
        link.settimeout(max(until - time.monotonic(), 0.001))
        link.sendall(b"\r\n\r\n")
        try:
            reply = link.recv(_SHOWN)
        except TimeoutError:
            return b""
    return reply
