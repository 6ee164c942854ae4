"""The store at which the workers of a group meet, from the address that their options name.

A static group meets where torch's rendezvous says, so that it shares MASTER_PORT with ``init_process_group``. So does a
worker of a dynamic group that is given a rank. One without a rank cannot be told by it whether to host the store: it
tries to, and whoever gets the port first is the host. Its store lives as long as its process.
"""

import errno
import os
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from telegrad.options import RpcBackendOptions
from telegrad.worker.addresses import is_loopback
from telegrad.worker.calls import FOREVER

__all__ = ["meet", "patience"]

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
_rendezvous: list[Any] = []  # kept alive: some stores end with their iterator
_hosted: list[Any] = []  # stores of this process that others may use, though its own worker has left


def patience(options: RpcBackendOptions) -> float:
    """How long to wait for the other workers, in seconds: as long as for a call, unless that is for ever."""
    return options.rpc_timeout if 0 < options.rpc_timeout < FOREVER else 300.0


def meet(
    options: RpcBackendOptions, rank: int, world_size: int | None, ranks_needed: bool = False
) -> tuple[Any, int, int | None]:
    """The store that the options name, with the rank and the world size that its address may add.

    Args:
        ranks_needed: a worker of a group whose members come and go must have a rank too, as with torch's own options.

    Raises:
        ValueError: the address lacks something, or the rank of a static group is missing.
        RuntimeError: the store cannot be reached, or not made.
    """
    timeout = timedelta(seconds=patience(options))
    if world_size:
        meeting = dist.rendezvous(options.init_method, rank=rank, world_size=world_size)  # type: ignore[attr-defined]
        _rendezvous[:] = [meeting]
        store, rank, world_size = next(meeting)
    else:
        store = None if ranks_needed or rank >= 0 else _without_rank(options.init_method, timeout)
        if store is None:
            from torch.distributed.rendezvous import _create_store_from_options

            store = _create_store_from_options(options, rank)  # type: ignore[no-untyped-call]
    store.set_timeout(timeout)
    return store, rank, world_size


def _without_rank(init_method: str, timeout: timedelta) -> Any:
    """The store for a worker without a rank; None where the address or the environment has one, or torch knows more."""
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
    elif url.scheme == "env" and not {"RANK", "WORLD_SIZE"} & set(os.environ):
        host, port = _from_environment("MASTER_ADDR"), int(_from_environment("MASTER_PORT"))
    else:
        return None
    libuv = query.get("use_libuv", [os.environ.get("USE_LIBUV", "1")])[-1] == "1"
    return _tcp_store(host, port, timeout, libuv)


def _from_environment(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ValueError(
            f"Error initializing torch.distributed using env:// rendezvous: environment variable {variable} expected,"
            " but not set"
        )
    return value


def _tcp_store(host: str, port: int, timeout: timedelta, libuv: bool) -> Any:
    """Hosts the store if this machine is the host and nobody else has the port; else it is a client."""
    # torchrun's agent hosts the store of its workers.
    listening = None if _agent_hosts(host, port) else _listen(host, port)
    if listening is None:
        return TCPStore(host, port, is_master=False, timeout=timeout, use_libuv=libuv)
    with listening:
        store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # a process group of this process may meet here as well
            master_listen_fd=listening.fileno(),
            use_libuv=libuv,
        )
        listening.detach()  # the store closes it
    _hosted.append(store)
    return store


def _agent_hosts(host: str, port: int) -> bool:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    return (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == (host, str(port))


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens on the port of this machine; None if the host is another one, or the port is taken."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as e:
        raise RuntimeError(f"the store's host {host} cannot be resolved: {e}") from e
    for family, _, _, _, address in found:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))
            except OSError:  # not an address of this machine
                continue
        try:
            if is_loopback(host):
                return socket.create_server((str(address[0]), port), family=family)
            # As torch does: other machines may know this one by another address.
            both = socket.has_dualstack_ipv6()
            anywhere = socket.AF_INET6 if both else family
            return socket.create_server(("", port), family=anywhere, dualstack_ipv6=both)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return None
            raise RuntimeError(f"the store of the group cannot be hosted at {host}:{port}: {e}") from e
    return None
