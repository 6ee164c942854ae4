"""The store at which the workers of a group meet, from the address that their options name.

A static group meets where torch's rendezvous says, so that it shares MASTER_PORT with ``init_process_group``. So does a
worker of a dynamic group that is given a rank. One without a rank cannot be told by it whether to host the store: it
tries to, and whoever gets the port first is the host. Its store lives as long as its process.

Workers of a static group that are on the host of its store reach it as `local_store` says, not by its port.
"""

import errno
import ipaddress
import logging
import os
import socket
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from telegrad.errors import TelegradError
from telegrad.options import Options, RpcBackendOptions, as_options
from telegrad.rpc.file_store import make_private
from telegrad.rpc.local_store import Door, LocalStore
from telegrad.rpc.probing import plain, probe
from telegrad.worker.addresses import is_loopback
from telegrad.worker.limited import StoreSilent, within
from telegrad.worker.timeouts import FOREVER
from telegrad.worker.waits import Wait

__all__ = ["meet", "patience"]

logger: logging.Logger = logging.getLogger("telegrad")

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
_rendezvous: list[Any] = []  # kept alive: some stores end with their iterator
_hosted: list[Any] = []  # stores of this process that others may use, though its own worker has left
_SOONEST, _LATEST = 0.001, 0.05  # s between two looks for a host that has not come yet,
_SLOWLY = 1.0  # and between two questions for its name
_SLOW_RESOLVER = 5.0  # s for one such question


class _Place(NamedTuple):
    """Where a static group meets."""

    host: str
    port: int
    rank: int
    libuv: bool
    hosted: bool = False  # by torchrun's agent


def _host_store(place: _Place, timeout: timedelta, listening: socket.socket | None) -> Any:
    with listening or nullcontext():
        store = TCPStore(
            place.host,
            place.port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # a process group of this process may meet here as well
            master_listen_fd=None if listening is None else listening.fileno(),
            use_libuv=place.libuv,
        )
        if listening is not None:
            listening.detach()  # the store closes it
    return store


class _Host:
    """The store that this process hosts at a port, as rank 0 of a group, and its door. Both end with it."""

    def __init__(self, place: _Place, timeout: timedelta) -> None:
        door = None
        try:
            door = Door(place.port)  # first: whoever finds the port open may rely on it that the door is there
        except OSError as e:
            logger.info("workers of this host will reach the group's store by its port alone: %s", e)
        try:
            # Without a socket: the port is taken, perhaps by a store of this process, or the address is not of this
            # machine, which others know by it all the same. Torch's store then says so, or listens on all addresses.
            self.store = _host_store(place, timeout, _listen(place.host, place.port))
        except BaseException as e:
            if door is not None:
                door.close()
            if isinstance(e, RuntimeError) and "EADDRINUSE" in str(e):
                raise _port_is_taken(place) from None
            raise
        self.door = door
        if door is not None:
            door.open(self.store)
            weakref.finalize(self, door.leave)


def _port_is_taken(place: _Place) -> TelegradError:
    """The error of rank 0, which cannot host a store there.

    Raises:
        TelegradError: the same, and the other program is known.
    """
    met = probe(place.host, place.port, _PROBE_PATIENCE)
    other = "the store of another group" if not met else "another program"
    return TelegradError(
        f"rank 0 cannot host the group's store at {place.host}:{place.port}: {other} has the port (EADDRINUSE)."
        " Give the group (MASTER_PORT, or init_method) a port that is free on the host of rank 0."
    )


_PROBE_PATIENCE = 2.0  # s
_hosts: "weakref.WeakValueDictionary[int, _Host]" = weakref.WeakValueDictionary()  # by port
_latest: list[Any] = []  # what this process has of the last static group's store


def _forget_in_child() -> None:
    """A forked child hosts nothing, and must not hold what its parent has at a door."""
    for host in list(_hosts.values()):
        if host.door is not None:
            host.door.abandon()
    _hosts.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def patience(options: RpcBackendOptions) -> float:
    """How long to wait for the other workers, in seconds: as long as for a call, unless that is for ever."""
    return options.rpc_timeout if 0 < options.rpc_timeout < FOREVER else 300.0


def ranks_of_launcher(options: Options) -> tuple[int, int | None]:
    """The rank and the world size that a launcher like torchrun has put into the environment; -1 and None if none has.

    Raises:
        ValueError: they are no numbers.
    """
    if not options.ranks_from_environment or urlparse(options.init_method).scheme != "env":
        return -1, None
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if not rank or not world_size:
        return -1, None
    try:
        return int(rank), int(world_size)
    except ValueError:
        raise ValueError(f"RANK={rank} and WORLD_SIZE={world_size} should be numbers") from None


def meet(
    name: str, options: RpcBackendOptions, rank: int, world_size: int | None, ranks_needed: bool = False
) -> tuple[Any, int, int | None]:
    """The store that the options name, with the rank and the world size that its address may add.

    Args:
        name: of the worker, for what the log tells while it waits.
        ranks_needed: a worker of a group whose members come and go must have a rank too, as with torch's own options.

    Raises:
        ValueError: the address lacks something, or the rank of a static group is missing.
        RuntimeError: the store cannot be reached, or not made.
    """
    timeout = timedelta(seconds=patience(options))
    if rank >= 0 or not (world_size or ranks_needed) or "rank" in parse_qs(urlparse(options.init_method).query):
        make_private(options.init_method)
    ranked = bool(world_size) or ranks_needed or rank >= 0 or _ranked_by_environment(options)
    place = _place(options.init_method, rank) if ranked else None
    wait = Wait(name if place is None else f"{name} (rank {place.rank})", timeout.total_seconds())
    if place is not None and world_size:
        rank = place.rank
        here = _is_here(place, wait)
        store = _as_host(place, timeout) if rank == 0 and not place.hosted else _as_guest(place, here, wait)
    elif place is not None:
        store = _tcp_store(place, wait) if place.rank == 0 else _by_port(place, wait)
    elif world_size:
        meeting = dist.rendezvous(options.init_method, rank=rank, world_size=world_size)  # type: ignore[attr-defined]
        _rendezvous[:] = [meeting]
        store, rank, world_size = next(meeting)
    else:
        store = None if ranked else _without_rank(options, wait)
        if store is None:
            from torch.distributed.rendezvous import _create_store_from_options

            store = _create_store_from_options(options, rank)  # type: ignore[no-untyped-call]
    store.set_timeout(timeout)
    return store, rank, world_size


def _place(init_method: str, rank: int) -> _Place | None:
    """Where to meet, if one of the workers hosts a store there; None if that is not so, or the address lacks something:
    then it is for torch to say."""
    url = urlparse(init_method)
    query = parse_qs(url.query)
    if {"rank", "world_size"} & set(query):
        return None
    try:
        if url.scheme == "tcp":
            host, port = url.hostname, url.port
        elif url.scheme == "env":
            host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", ""))
            rank = int(os.environ.get("RANK", "-1")) if rank < 0 else rank
        else:
            return None
    except ValueError:
        return None
    if not host or not port or rank < 0:
        return None
    # As in torch: with an agent no worker hosts a store, wherever it is.
    return _Place(host, port, rank, _libuv(query), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _libuv(query: dict[str, list[str]]) -> bool:
    return query.get("use_libuv", [os.environ.get("USE_LIBUV", "1")])[-1] == "1"


def _as_host(place: _Place, timeout: timedelta) -> Any:
    """The store, with a door for workers of this host. This process may have had it for its last group already."""
    host = _hosts.get(place.port)
    if host is None:
        _latest.clear()
        host = _hosts[place.port] = _Host(place, timeout)
    if host.door is None:
        store = host.store
    else:
        store = LocalStore(place.host, place.port, timeout)
        store.behind = host
    _latest[:] = [host, store]
    return store


def _as_guest(place: _Place, here: bool, wait: Wait) -> Any:
    """The store that rank 0 hosts, once it does: through the door of this host, else by its port."""
    _latest.clear()
    store = _through_door(place, wait) if here else None
    if store is None:
        store = _by_port(place, wait)
    _latest[:] = [store]
    return store


def _awaited(place: _Place, last: str) -> tuple[str, str]:
    """See `Wait.step`."""
    host = "the agent" if place.hosted else "rank 0" if place.rank >= 0 else "the group"
    return f"{host}'s store at {_at(place)}", last


def _at(place: _Place) -> str:
    return f"[{place.host}]:{place.port}" if ":" in place.host else f"{place.host}:{place.port}"


def _too_late(place: _Place, wait: Wait, last: str) -> RuntimeError:
    host = "rank 0, which hosts it," if place.rank >= 0 else "its host"
    error: RuntimeError = dist.DistNetworkError(
        f"no store at {_at(place)} within {wait.timeout:g} s: {host} has not come. Is it started, with this"
        f" address? The last attempt met: {last}."
    )
    return error


def _by_port(place: _Place, wait: Wait) -> Any:
    """The store at a port, once there is one.

    Raises:
        DistNetworkError: there is none within the time of `wait`.
        TelegradError: another program has the port.
    """
    pause = _SOONEST
    while last := probe(place.host, place.port, wait.left or 0.001):
        if not wait.left:
            raise _too_late(place, wait, last)
        wait.step(lambda last=last: _awaited(place, last))  # type: ignore[misc]
        time.sleep(min(pause, wait.pause()))
        pause = min(2 * pause, _LATEST)
    timeout = timedelta(seconds=wait.timeout)
    return TCPStore(
        place.host, place.port, is_master=False, timeout=timeout, wait_for_workers=False, use_libuv=place.libuv
    )


def _through_door(place: _Place, wait: Wait) -> LocalStore | None:
    """Waits for the door; None if the host, which is on this machine, has none.

    Raises:
        DistNetworkError: there is no host within the time of `wait`.
        TelegradError: another program has the port.
    """
    pause = _SOONEST
    while True:
        last = ""
        for a_store_listens in (False, True):
            try:
                return LocalStore(place.host, place.port, timedelta(seconds=wait.timeout))
            except ConnectionRefusedError:
                if a_store_listens:
                    return None
            except OSError as e:  # the host of another group, which is just going
                last = str(e)
                break
            last = probe(place.host, place.port, wait.left or 0.001)
            if last:
                break
        if not wait.left:
            raise _too_late(place, wait, last)
        wait.step(lambda last=last: _awaited(place, last))  # type: ignore[misc]
        time.sleep(min(pause, wait.pause()))
        pause = min(2 * pause, _LATEST)


def _is_address(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_unspecified
    except ValueError:
        return False


def _is_here(place: _Place, wait: Wait) -> bool:
    """Is it an address of this machine? Waits until its name is known, as that of a fresh container may not be.

    Raises:
        RuntimeError: the name is not known within the time of `wait`.
    """
    if is_loopback(place.host):
        return True
    pause = _SOONEST
    while True:
        try:
            ask = partial(socket.getaddrinfo, plain(place.host), 0, type=socket.SOCK_STREAM)
            # No signal ends a question to the resolver.
            found = ask() if _is_address(place.host) else within(min(wait.left or 0.001, _SLOW_RESOLVER), ask)
            return any(_is_own(family, address) for family, _, _, _, address in found)
        except StoreSilent:
            last = "no answer"
        except OSError as e:
            last = e.strerror or str(e)
        if not wait.left:
            raise RuntimeError(
                f"the host {place.host} of the group's store cannot be resolved: {last}."
                " Check MASTER_ADDR, or init_method."
            )
        wait.step(lambda last=last: (f"the address of {place.host}, the store's host", last))  # type: ignore[misc]
        time.sleep(min(pause, wait.pause()))
        pause = min(2 * pause, _SLOWLY)


def _is_own(family: int, address: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def _without_rank(options: RpcBackendOptions, wait: Wait) -> Any:
    """The store for a worker without a rank; None where torch knows more."""
    init_method = options.init_method
    url = urlparse(init_method)
    query = parse_qs(url.query)
    if {"rank", "world_size"} & set(query):
        return None
    if url.scheme == "file":
        if not url.path:
            raise ValueError(f"init_method {init_method} names no file. Write file:///path/to/a/file.")
        return dist.FileStore(url.path, -1)  # type: ignore[attr-defined]
    if url.scheme == "tcp":
        if not url.hostname or url.port is None:
            raise ValueError(f"init_method {init_method} lacks a host or a port. Write tcp://host:port.")
        host, port = url.hostname, url.port
    elif url.scheme == "env":
        host, port = _from_environment("MASTER_ADDR"), int(_from_environment("MASTER_PORT"))
    else:
        return None
    return _tcp_store(_Place(host, port, -1, _libuv(query), _agent_hosts(host, port)), wait)


def _ranked_by_environment(options: RpcBackendOptions) -> bool:
    if urlparse(options.init_method).scheme != "env" or not {"RANK", "WORLD_SIZE"} & set(os.environ):
        return False
    return as_options(options).ranks_from_environment


def _from_environment(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ValueError(
            f"Error initializing torch.distributed using env:// rendezvous: environment variable {variable} expected,"
            " but not set"
        )
    return value


def _tcp_store(place: _Place, wait: Wait) -> Any:
    """Hosts the store if this machine is the host and nobody else has the port; else it is a client."""
    # torchrun's agent hosts the store of its workers.
    listening = _listen(place.host, place.port) if _is_here(place, wait) and not place.hosted else None
    if listening is None:
        return _by_port(place, wait)
    logger.info("%s hosts the store of a new group at %s: there was none", wait.who, _at(place))
    store = _host_store(place, timedelta(seconds=wait.timeout), listening)
    _hosted.append(store)
    return store


def _agent_hosts(host: str, port: int) -> bool:
    """Is it the store that torchrun's agent hosts for its workers?"""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    return (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == (host, str(port))


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens on the port of this machine; None if the host is another one, or the port is taken.

    It listens at the address that was asked for. A name stands for all of them, but for localhost: to other machines it
    may be another one.
    """
    found = socket.getaddrinfo(plain(host), port, type=socket.SOCK_STREAM)
    # localhost resolves to IPv4 and IPv6; 127.0.0.1 to IPv4 alone.
    for family, _, _, _, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        if not _is_own(family, address):
            continue
        try:
            if is_loopback(host) or _is_address(host):
                return socket.create_server((str(address[0]), port), family=family)
            both = socket.has_dualstack_ipv6()
            anywhere = socket.AF_INET6 if both else family
            return socket.create_server(("", port), family=anywhere, dualstack_ipv6=both)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return None
            raise RuntimeError(f"the store of the group cannot be hosted at {host}:{port}: {e}") from e
    return None
