"""What listens at the port of a store: a store, another program, or nothing."""

import secrets
import socket
import struct
import time
from typing import Any

from telegrad.errors import TelegradError

__all__ = ["plain", "probe"]

# What torch's clients of a store say first: VALIDATE with its magic number, and PING, which is answered by the number.
_VALIDATE, _PING, _MAGIC = 0, 13, 0x3C85F7CE
_HELLO = struct.Struct("<BIBI")
_NUMBER = struct.Struct("<I")
_PATIENCE = 5.0  # s for one probe at most; a store that is busy may need it
_HINT_AFTER = 1.0  # s: what waits for a line gets one
_SHOWN = 60  # bytes of a strange answer


def plain(host: str) -> Any:
    """For `socket`, which imports tables of Unicode to look a string up, but not for bytes."""
    return host.encode() if host.isascii() else host


def probe(host: str, port: int, timeout: float) -> str:
    """Ask whether a store listens there.

    Returns:
        "" if one does, else what was met.

    Raises:
        TelegradError: another program listens there.
    """
    timeout = min(timeout, _PATIENCE)
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
        return "something listens there, but does not answer as a store does"
    other = "an HTTP server" if answer.startswith(b"HTTP/") or b"<!doctype" in answer.lower() else "another program"
    raise TelegradError(
        f"what listens at {host}:{port} is not the store of a group, but {other}: it answers {answer!r}."
        " Give the group (MASTER_PORT, or init_method) a port that is free on the host of rank 0."
    )


def _answer(link: socket.socket, until: float) -> bytes:
    """What the other side says; b"" if nothing until its time is up, or it hangs up."""
    link.settimeout(min(_HINT_AFTER, max(until - time.monotonic(), 0.001)))
    try:
        said = link.recv(_SHOWN)
    except TimeoutError:
        # A store would have answered. A server of lines, HTTP for one, has not seen the end of one.
        link.settimeout(max(until - time.monotonic(), 0.001))
        link.sendall(b"\r\n\r\n")
        try:
            said = link.recv(_SHOWN)
        except TimeoutError:
            return b""
    return said
