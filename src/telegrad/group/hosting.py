"""Store that rank 0 of a static group hosts, with its Unix socket server.

The Unix socket serves the workers of the same host. The store stays with the process after the group has ended, for the
next group at the same port. It ends when the process joins another group as a client, or at another port, or when
another process of this host asks for the port.
"""

import errno
import ipaddress
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from telegrad.errors import TelegradError
from telegrad.group.addresses import is_loopback
from telegrad.group.probing import plain, probe
from telegrad.group.store_waits import Store
from telegrad.group.unix_store import LocalStore, UnixStoreServer, request_release

__all__ = [
    "PortInUse",
    "StoreAddress",
    "TCPStore",
    "host_for_worker",
    "host_store",
    "is_address",
    "is_own",
    "latest",
    "listen",
]

logger: logging.Logger = logging.getLogger("telegrad")

TCPStore: Callable[..., Store] = dist.TCPStore  # type: ignore[attr-defined,assignment]
latest: list[object] = []
"""Store objects of the last static group, kept alive for the next one."""
_HANDOVER = 3.0  # s for the previous group to end, once rank 0 of the next one wants its port
_MIN_PAUSE, _MAX_PAUSE = 0.001, 0.05  # s between two attempts
_PROBE_TIMEOUT = 2.0  # s


class StoreAddress(NamedTuple):
    """Address at which a static group meets."""

    host: str
    port: int
    rank: int
    libuv: bool
    hosted: bool = False  # by torchrun's agent

    @property
    def at(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PortInUse(Exception):
    """A socket of this machine listens on the port."""


class _PortIsTaken(TelegradError):
    """Port taken, by the store of another group or by a program that does not reply."""


class _Host:
    """Store that this process hosts at a port as rank 0, with its Unix socket server.

    The store and the server end with this object.

    Raises:
        _PortIsTaken: the port is taken, and may become free.
        TelegradError: a program that is not a store has the port.
    """

    def __init__(self, address: StoreAddress, timeout: timedelta) -> None:
        server, no_server = None, ""
        try:
            # Before the port opens: a client that finds the port open relies on the server.
            server = UnixStoreServer(address.port)
        except OSError as e:
            no_server = str(e)
        try:
            self.store = _store_of_rank_0(address, timeout)
        except BaseException as e:
            if server is not None:
                server.close()
            if isinstance(e, RuntimeError) and "EADDRINUSE" in str(e):
                raise _port_is_taken(address) from None
            raise
        self.server = server
        self._users: weakref.WeakSet[LocalStore] = weakref.WeakSet()  # stores of this process's workers of rank 0
        if server is None:
            logger.info("workers of this host will reach the group's store by its port alone: %s", no_server)
            return
        self_ref = weakref.ref(self)
        server.open(self.store, lambda: (host := self_ref()) is not None and host._release_port())
        weakref.finalize(self, server.close_later)

    def store_for(self, address: StoreAddress, timeout: timedelta) -> Store:
        """Return the store for a worker. The store keeps the host alive."""
        if self.server is None:
            return self.store
        store = LocalStore(address.host, address.port, timeout)
        self.adopt(store)
        return store

    def adopt(self, store: LocalStore) -> None:
        """Live as long as a store that a worker of this process uses."""
        store.keep_alive = self
        self._users.add(store)

    def _release_port(self) -> bool:
        """Give up the port to another process, unless a worker still uses the store."""
        if self._users:
            return False
        latest[:] = [each for each in latest if each is not self]
        return True


def _store_of_rank_0(address: StoreAddress, timeout: timedelta) -> Store:
    """Host the store of rank 0, or share that of a process group of this process.

    Raises:
        _PortIsTaken: another process has the port.
        RuntimeError: the store cannot be hosted, or cannot be reached at its address.
    """
    try:
        listening = listen(address.host, address.port)
    except PortInUse:
        # Torch shares its store of this process. Without one, it would listen on all addresses if the port becomes free
        # at this moment.
        if not _listens_itself(address.port):
            raise _port_is_taken(address) from None
        return host_store(address, timeout, None)
    if listening is not None:
        return host_store(address, timeout, listening)
    logger.warning(
        "rank 0 listens on all addresses of its machine for the group's store, at port %d: %s is not an address of this"
        " machine. That is right behind address translation or port forwarding. Otherwise, check MASTER_ADDR, or"
        " init_method.",
        address.port,
        address.host,
    )
    try:
        return host_store(address, timeout, None)
    except dist.DistNetworkError as e:
        if "EADDRINUSE" in str(e):
            raise
        raise TelegradError(
            f"rank 0 hosts the group's store and cannot reach it at {address.at}, which is not an address of its"
            f" machine: {e}. Give MASTER_ADDR, or init_method, an address of the machine of rank 0, or one that is"
            " forwarded to it."
        ) from e


def _listens_itself(port: int) -> bool:
    """Return whether this process has a socket that listens on a TCP port."""
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            s = socket.socket(fileno=duplicate)
        except OSError:  # no socket
            os.close(duplicate)
            continue
        with s:
            is_tcp = s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM
            if is_tcp and s.getsockname()[1] == port and s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return True
    return False


def _port_is_taken(address: StoreAddress) -> _PortIsTaken:
    """Return the error of rank 0 for a port that is taken.

    Raises:
        TelegradError: the port is taken by a program that is not a store; the text has its reply.
    """
    # A store that closes does not reply, or has freed the port by now.
    other = "another program" if probe(address.host, address.port, _PROBE_TIMEOUT) else "the store of another group"
    return _PortIsTaken(
        f"rank 0 cannot host the group's store at {address.host}:{address.port}: {other} has the port (EADDRINUSE)."
        " Give the group (MASTER_PORT, or init_method) a port that is free on the host of rank 0."
    )


_hosts: "weakref.WeakValueDictionary[int, _Host]" = weakref.WeakValueDictionary()  # by port


def _forget_in_child() -> None:
    """Drop all hosts in a forked child, which must not hold its parent's sockets."""
    for host in list(_hosts.values()):
        if host.server is not None:
            host.server.detach_after_fork()
    _hosts.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def host_for_worker(address: StoreAddress, timeout: timedelta) -> Store:
    """Return the store and serve it to the workers of this host as well.

    Reuses the store that this process hosted for its last group at the same port.

    Raises:
        TelegradError: the port is taken and did not become free in time.
    """
    host = _hosts.get(address.port)
    if host is None:
        latest.clear()
        host = _hosts[address.port] = _new_host(address, timeout)
    store = host.store_for(address, timeout)
    latest[:] = [host]
    return store


def _new_host(address: StoreAddress, timeout: timedelta) -> _Host:
    """Host a store, and ask another process that still has the port to give it up."""
    until = time.monotonic() + min(_HANDOVER, timeout.total_seconds())
    pause = _MIN_PAUSE
    while True:
        try:
            return _Host(address, timeout)
        except _PortIsTaken:
            if time.monotonic() >= until:
                raise
        request_release(address.port)
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE)


def host_store(address: StoreAddress, timeout: timedelta, listening: socket.socket | None) -> Store:
    with listening or nullcontext():
        store = TCPStore(
            address.host,
            address.port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # a process group of this process may meet here as well
            master_listen_fd=None if listening is None else listening.fileno(),
            use_libuv=address.libuv,
        )
        if listening is not None:
            listening.detach()  # the store closes it
    return store


def is_address(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_unspecified
    except ValueError:
        return False


def is_own(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on a port of this machine.

    The socket listens at the given address. For a name except localhost it listens on all addresses: the name may
    resolve to another address on other machines.

    Returns:
        None if the host is another machine.

    Raises:
        PortInUse: The port is taken.
        RuntimeError: The port cannot be opened.
    """
    found = socket.getaddrinfo(plain(host), port, type=socket.SOCK_STREAM)
    # localhost resolves to IPv4 and IPv6; 127.0.0.1 to IPv4 alone.
    for family, _, _, _, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        if not is_own(family, address):
            continue
        try:
            if is_loopback(host) or is_address(host):
                return socket.create_server((str(address[0]), port), family=family)
            both = socket.has_dualstack_ipv6()
            anywhere = socket.AF_INET6 if both else family
            return socket.create_server(("", port), family=anywhere, dualstack_ipv6=both)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise PortInUse from None
            raise RuntimeError(f"the group's store cannot be hosted at {host}:{port}: {e}") from e
    return None
