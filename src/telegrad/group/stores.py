"""Store at which the workers of a group meet, at the address in their options.

A static group meets at the address of torch's rendezvous, so that it shares MASTER_PORT with ``init_process_group``. So
does a worker of a dynamic group that has a rank. A worker without a rank cannot derive whether it hosts the store: the
first worker to bind the port is the host. Its store lives as long as its process.

Workers of a static group on the store's host reach it through a Unix socket (`unix_store`) instead of the port.
"""

import logging
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from telegrad.group.addresses import is_loopback
from telegrad.group.file_store import make_private
from telegrad.group.hosting import (
    PortInUse,
    StoreAddress,
    TCPStore,
    host_for_worker,
    host_store,
    is_address,
    is_own,
    latest,
    listen,
)
from telegrad.group.log import has_ended
from telegrad.group.probing import plain, probe
from telegrad.group.store_waits import DYNAMIC, Part, Store, StoreUnresponsive, within
from telegrad.group.unix_store import LocalStore
from telegrad.options import Options, RpcBackendOptions, as_options
from telegrad.timeouts import FOREVER
from telegrad.waits import Wait

__all__ = ["is_client", "meet", "rendezvous_timeout"]

logger: logging.Logger = logging.getLogger("telegrad")

_rendezvous: list[object] = []  # kept alive: some stores close with their iterator
# Stores of dynamic groups that this process hosts: others may use them after its worker has left. Those of groups that
# have ended close when the process hosts another one.
_hosted: list[Store] = []
_MIN_PAUSE, _MAX_PAUSE = 0.001, 0.05  # s between two checks for a host that has not started yet,
_MAX_RESOLVER_PAUSE = 1.0  # and between two queries for its name
_SLOW_RESOLVER = 5.0  # s for one such query


def rendezvous_timeout(options: RpcBackendOptions) -> float:
    """Return the timeout of the rendezvous in seconds: that of a call, if limited."""
    return options.rpc_timeout if 0 < options.rpc_timeout < FOREVER else 300.0


def ranks_of_launcher(options: Options) -> tuple[int, int | None]:
    """Return the rank and the world size set by a launcher like torchrun.

    Returns:
        Rank and world size; -1 and None if no launcher has set them.

    Raises:
        ValueError: they are not numbers.
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
    name: str,
    options: RpcBackendOptions,
    rank: int,
    world_size: int | None,
    ranks_needed: bool = False,
    limit: float | None = None,
) -> tuple[Store, int, int | None]:
    """Return the store that the options name.

    Args:
        name: of the worker, for log lines during the wait.
        ranks_needed: a worker of a dynamic group must have a rank too, as with torch's own options.
        limit: limit in seconds for the store's host to start; by default that of `rendezvous_timeout`.

    Returns:
        The store, with the rank and the world size that the environment may have added.

    Raises:
        ValueError: the address is incomplete, or has a rank or a world size, or the rank of a static group is missing.
        RuntimeError: the store cannot be reached or created.
    """
    timeout = timedelta(seconds=rendezvous_timeout(options))
    if urlparse(options.init_method).scheme == "etcd":
        from telegrad.group.etcd_store import EtcdStore

        waiter = name if rank < 0 else f"{name} (rank {rank})"
        return EtcdStore(options.init_method, timeout, Wait(waiter, timeout.total_seconds())), rank, world_size
    store: Store | None
    if {"rank", "world_size"} & set(parse_qs(urlparse(options.init_method).query)):
        raise ValueError(
            f"init_method {options.init_method} has a rank or a world size. Give them as the arguments rank and"
            " world_size instead."
        )
    if rank >= 0 or not (world_size or ranks_needed):
        make_private(options.init_method)
    ranked = bool(world_size) or ranks_needed or rank >= 0 or _ranked_by_environment(options)
    address = _address(options.init_method, rank) if ranked else None
    waiter = name if address is None else f"{name} (rank {address.rank})"
    wait = Wait(waiter, timeout.total_seconds() if limit is None else limit)
    if address is not None and world_size:
        rank = address.rank
        is_local = _is_local(address, wait)
        store = (
            host_for_worker(address, timeout)
            if rank == 0 and not address.hosted
            else _connect_as_client(address, is_local, wait)
        )
    elif address is not None:
        store = _tcp_store(address, wait) if address.rank == 0 else _connect_by_port(address, wait)
    elif world_size:
        meeting = dist.rendezvous(options.init_method, rank=rank, world_size=world_size)  # type: ignore[attr-defined]
        _rendezvous[:] = [meeting]
        store, rank, world_size = next(meeting)
    else:
        store = None if ranked else _store_without_rank(options, wait)
        if store is None:
            from torch.distributed.rendezvous import _create_store_from_options

            store = _create_store_from_options(options, rank)  # type: ignore[no-untyped-call]
    store.set_timeout(timeout)
    return store, rank, world_size


def is_client(options: RpcBackendOptions, rank: int, world_size: int | None) -> bool:
    """Return whether a static group's worker uses the store that rank 0 hosts."""
    address = _address(options.init_method, rank) if world_size else None
    return address is not None and address.rank > 0 and not address.hosted


def _address(init_method: str, rank: int) -> StoreAddress | None:
    """Return the address to meet at, if one of the workers hosts a store there.

    Returns None if that is not so, or if the address is incomplete: then torch reports the error.
    """
    url = urlparse(init_method)
    query = parse_qs(url.query)
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
    # As in torch: under an agent no worker hosts a store, at any address.
    return StoreAddress(host, port, rank, _libuv(query), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _libuv(query: dict[str, list[str]]) -> bool:
    return query.get("use_libuv", [os.environ.get("USE_LIBUV", "1")])[-1] == "1"


def _connect_as_client(address: StoreAddress, is_local: bool, wait: Wait) -> Store:
    """Return the store that rank 0 hosts, once it does.

    The worker uses the Unix socket if it is on the same host, otherwise the port.
    """
    latest.clear()
    store = (_connect_by_unix_socket(address, wait) if is_local else None) or _connect_by_port(address, wait)
    latest[:] = [store]
    return store


def _awaited(address: StoreAddress, last: str) -> tuple[str, str]:
    """Describe the wait, for `Wait.step`."""
    host = "the agent" if address.hosted else "rank 0" if address.rank >= 0 else "the group"
    return f"{host}'s store at {address.at}", last


def _timeout_error(address: StoreAddress, wait: Wait, last: str) -> RuntimeError:
    host = "rank 0, which hosts it," if address.rank >= 0 else "its host"
    error: RuntimeError = dist.DistNetworkError(
        f"no store at {address.at} within {wait.timeout:g} s: {host} did not start in time. Is it started, with this"
        f" address? The last attempt met: {last}."
    )
    return error


def _connect_by_port(address: StoreAddress, wait: Wait) -> Store:
    """Return the store at a port, once there is one.

    Raises:
        DistNetworkError: there is none within the time of `wait`.
        TelegradError: another program has the port.
    """
    pause = _MIN_PAUSE
    while last := probe(address.host, address.port, wait.left or 0.001):
        if not wait.left:
            raise _timeout_error(address, wait, last)
        wait.step(lambda last=last: _awaited(address, last))  # type: ignore[misc]
        time.sleep(min(pause, wait.pause()))
        pause = min(2 * pause, _MAX_PAUSE)
    timeout = timedelta(seconds=wait.timeout)
    return TCPStore(
        address.host, address.port, is_master=False, timeout=timeout, wait_for_workers=False, use_libuv=address.libuv
    )


def _connect_by_unix_socket(address: StoreAddress, wait: Wait) -> LocalStore | None:
    """Wait for the host's Unix socket; None if the local host has none.

    Raises:
        DistNetworkError: there is no host within the time of `wait`.
        TelegradError: another program has the port.
    """
    pause = _MIN_PAUSE
    while True:
        last = ""
        for a_store_listens in (False, True):
            try:
                return LocalStore(address.host, address.port, timedelta(seconds=wait.timeout))
            except ConnectionRefusedError:
                if a_store_listens:
                    return None
            except OSError as e:  # the host of a previous group, which is closing
                last = str(e)
                break
            last = probe(address.host, address.port, wait.left or 0.001)
            if last:
                break
        if not wait.left:
            raise _timeout_error(address, wait, last)
        wait.step(lambda last=last: _awaited(address, last))  # type: ignore[misc]
        time.sleep(min(pause, wait.pause()))
        pause = min(2 * pause, _MAX_PAUSE)


def _is_local(address: StoreAddress, wait: Wait) -> bool:
    """Return whether the address is of this machine.

    Waits until the name can be resolved; in a new container this may take a while.

    Raises:
        RuntimeError: the name cannot be resolved within the time of `wait`.
    """
    if is_loopback(address.host):
        return True
    pause = _MIN_PAUSE
    while True:
        try:
            ask = partial(socket.getaddrinfo, plain(address.host), 0, type=socket.SOCK_STREAM)
            # A signal cannot interrupt a query to the resolver.
            found = ask() if is_address(address.host) else within(min(wait.left or 0.001, _SLOW_RESOLVER), ask)
            return any(is_own(family, found_at) for family, _, _, _, found_at in found)
        except StoreUnresponsive:
            last = "no answer"
        except OSError as e:
            last = e.strerror or str(e)
        if not wait.left:
            raise RuntimeError(
                f"the host {address.host} of the group's store cannot be resolved: {last}."
                " Check MASTER_ADDR, or init_method."
            )
        wait.step(lambda last=last: (f"the address of {address.host}, the store's host", last))  # type: ignore[misc]
        time.sleep(min(pause, wait.pause()))
        pause = min(2 * pause, _MAX_RESOLVER_PAUSE)


def _store_without_rank(options: RpcBackendOptions, wait: Wait) -> Store | None:
    """Return the store for a worker without a rank; None to leave it to torch."""
    init_method = options.init_method
    url = urlparse(init_method)
    query = parse_qs(url.query)
    if url.scheme == "file":
        if not url.path:
            raise ValueError(f"init_method {init_method} names no file. Write file:///path/to/a/file.")
        return dist.FileStore(url.path, -1)  # type: ignore[attr-defined,return-value]
    if url.scheme == "tcp":
        if not url.hostname or url.port is None:
            raise ValueError(f"init_method {init_method} lacks a host or a port. Write tcp://host:port.")
        host, port = url.hostname, url.port
    elif url.scheme == "env":
        host, port = _from_environment("MASTER_ADDR"), int(_from_environment("MASTER_PORT"))
    else:
        return None
    return _tcp_store(StoreAddress(host, port, -1, _libuv(query), _agent_hosts(host, port)), wait)


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


def _tcp_store(address: StoreAddress, wait: Wait) -> Store:
    """Host the store if this machine is the host and the port is free; else connect."""
    # torchrun's agent hosts the store of its workers.
    listening = None
    if _is_local(address, wait) and not address.hosted:
        with suppress(PortInUse):
            listening = listen(address.host, address.port)
    if listening is None:
        return _connect_by_port(address, wait)
    logger.info("%s hosts the store of a new group at %s: there was none", wait.waiter, address.at)
    _hosted[:] = [each for each in _hosted if not has_ended(Part(DYNAMIC, each))]
    store = host_store(address, timedelta(seconds=wait.timeout), listening)
    _hosted.append(store)
    return store


def _agent_hosts(host: str, port: int) -> bool:
    """Return whether torchrun's agent hosts the store for its workers."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    return (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == (host, str(port))
