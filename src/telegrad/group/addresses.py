"""Where a worker listens, what it tells the others, and which of another's addresses to try."""

import fcntl
import ipaddress
import os
import secrets
import socket
import struct
from typing import Any
from urllib.parse import urlparse

from telegrad.options import Options

__all__ = ["candidates", "host_key", "is_loopback", "listen_addresses", "store_host"]

_SIOCGIFADDR = 0x8915
_SAME_HOST = ("shm", "unix")  # transports whose addresses are names of Unix sockets


def host_key() -> str:
    """Equal for two processes that can reach each other's abstract Unix sockets: same boot, same network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"unknown/{secrets.token_hex(8)}"


def store_host(init_method: str, store: Any) -> str:
    """The host of the store, or "" if it has none (a file)."""
    url = urlparse(init_method)
    if url.scheme == "tcp":
        return url.hostname or ""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", "")
    if host:
        return str(host)
    return os.environ.get("MASTER_ADDR", "") if url.scheme == "env" else ""


def is_loopback(host: str) -> bool:
    """Is it an address that only this machine reaches?"""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("localhost", "")


def _own_address(towards: str, wanted: int = socket.AF_UNSPEC) -> str:
    """The address of the interface by which a host is reached, of the wanted family."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(towards, 9, wanted, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as s:
            s.connect(address)  # sends nothing: it only chooses a route
            return str(s.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as e:
            raise RuntimeError(f"TP_SOCKET_IFNAME names the interface {name}, which has no IPv4 address: {e}") from e
    return socket.inet_ntoa(answer[20:24])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def listen_addresses(options: Options, store_at: str, name: str) -> tuple[list[str], str]:
    """What to listen on, and the host among it."""
    host = options.bind or None
    if host is None and os.environ.get("TP_SOCKET_IFNAME"):
        host = _interface_address(os.environ["TP_SOCKET_IFNAME"])
    if host is None:
        host = "127.0.0.1" if is_loopback(store_at) else _own_address(store_at)
    addresses = []
    for transport in options.transports:
        if transport in _SAME_HOST:
            addresses.append(f"{transport}:@telegrad-{secrets.token_hex(8)}-{name}"[:100])
        elif transport == "tcp":
            addresses.append(f"tcp:{_bracketed(host)}:0")
    return addresses, host


def advertised(bound: list[str], options: Options, store_at: str) -> list[str]:
    """What the others are told. A wildcard address leads nowhere: they get the one that leads to the store's host."""
    told = None
    if options.advertise is not None:
        try:
            told = str(socket.getaddrinfo(options.advertise, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as e:
            raise RuntimeError(f"option advertise names {options.advertise}, which cannot be resolved: {e}") from e
    addresses = []
    for address in bound:
        scheme, _, rest = address.partition(":")
        if scheme != "tcp":
            addresses.append(address)
            continue
        host, _, port = rest.rpartition(":")
        addresses.append(f"tcp:{_bracketed(told or _without_wildcard(host, store_at))}:{port}")
    return addresses


def _without_wildcard(host: str, store_at: str) -> str:
    own = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    if not own.is_unspecified:
        return host
    if is_loopback(store_at):
        return "127.0.0.1" if own.version == 4 else "::1"
    # A socket on :: takes IPv4 as well; one on 0.0.0.0 takes nothing else.
    return _own_address(store_at, socket.AF_INET if own.version == 4 else socket.AF_UNSPEC)


def candidates(addresses: list[str], same_host: bool, transports: tuple[str, ...]) -> list[str]:
    """Which of another worker's addresses to try, best first."""
    usable = [f"{name}:" for name in transports if same_host or name not in _SAME_HOST]
    return [address for scheme in usable for address in addresses if address.startswith(scheme)]
