"""Addresses: where a worker listens, which it publishes, and which to connect to."""

import fcntl
import ipaddress
import os
import secrets
import socket
import struct
from urllib.parse import urlparse

from telegrad.options import Options

__all__ = ["candidates", "host_key", "is_loopback", "listen_addresses", "store_host", "transport_of"]

_SIOCGIFADDR = 0x8915
_SAME_HOST = ("shm", "unix")  # transports with names of Unix sockets as addresses
_SCHEMES = {"tcp": ("tls", "tcp")}  # of the addresses of a transport, if there are several


def host_key() -> str:
    """Return a key shared by processes that reach each other's abstract Unix sockets.

    Such processes have the same boot and the same network namespace.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"unknown/{secrets.token_hex(8)}"


def store_host(init_method: str, store: object) -> str:
    """Return the host of the store, or "" if the store has none (a file)."""
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
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("localhost", "")


def _own_address(towards: str, wanted: int = socket.AF_UNSPEC) -> str:
    """Return the local address of the interface that routes to a host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(towards, 9, wanted, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as s:
            s.connect(address)  # sends nothing: connecting only selects a route
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


def listen_addresses(options: Options, store_at: str, name: str, encrypted: bool = False) -> tuple[list[str], str]:
    """Return the addresses to listen on, and their host."""
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
            addresses.append(f"{'tls' if encrypted else 'tcp'}:{_bracketed(host)}:0")
    return addresses, host


def advertised(bound: list[str], options: Options, store_at: str) -> list[str]:
    """Return the addresses to publish.

    A wildcard address is replaced by the local address that routes to the store's host.

    Raises:
        RuntimeError: The option `advertise` has no address that the worker's sockets accept.
    """
    addresses = []
    for address in bound:
        scheme, _, rest = address.partition(":")
        if scheme not in _SCHEMES["tcp"]:
            addresses.append(address)
            continue
        host, _, port = rest.rpartition(":")
        name = options.advertise
        published = _without_wildcard(host, store_at) if name is None else _resolve_advertised(name.strip("[]"), host)
        addresses.append(f"{scheme}:{_bracketed(published)}:{port}")
    return addresses


def _resolve_advertised(name: str, bound: str) -> str:
    """Return the address of a name for a socket that listens on `bound`."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as e:
        raise RuntimeError(f"option advertise names {name}, which cannot be resolved: {e}") from e
    own = _ip(bound)
    for address in found:
        # A socket on :: accepts IPv4 as well. An address, not a name, may be translated on the way.
        if address == name or _ip(address).version == own.version or (own.version == 6 and own.is_unspecified):
            return address
    raise RuntimeError(
        f"option advertise names {name}, which has the addresses {', '.join(sorted(set(found)))}: none of them is an"
        f" IPv{own.version} address, as {bound} is, where this worker listens. Set the option bind to an address of"
        " the other version, or advertise an address."
    )


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host.strip("[]").partition("%")[0])


def _without_wildcard(host: str, store_at: str) -> str:
    own = _ip(host)
    if not own.is_unspecified:
        return host
    if is_loopback(store_at):
        return "127.0.0.1" if own.version == 4 else "::1"
    # A socket on :: accepts IPv4 as well; a socket on 0.0.0.0 accepts only IPv4.
    return _own_address(store_at, socket.AF_INET if own.version == 4 else socket.AF_UNSPEC)


def transport_of(scheme: str) -> str:
    """Return the transport of an address with this scheme."""
    return next((name for name, schemes in _SCHEMES.items() if scheme in schemes), scheme)


def candidates(addresses: list[str], same_host: bool, transports: tuple[str, ...]) -> list[str]:
    """Return the addresses of another worker to try, best first."""
    names = [name for name in transports if same_host or name not in _SAME_HOST]
    usable = [f"{scheme}:" for name in names for scheme in _SCHEMES.get(name, (name,))]
    return [address for scheme in usable for address in addresses if address.startswith(scheme)]
