"""Helpers for tests of membership: members that exist only in the log."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from free_ports import free_port

from telegrad.group.group_store import group_store_of
from telegrad.group.lease import lease_key, sealed_lease
from telegrad.group.log import GroupLog
from telegrad.group.records import seat_of
from telegrad.protocols.leases import lease_value
from telegrad.protocols.membership import Join, Member
from telegrad.rpc import Worker


def log_of(store: Any, worker: Worker | None = None) -> GroupLog:
    """Return the log of a dynamic group at a store, read now."""
    log = GroupLog(group_store_of(store), None if worker is None else worker._worker.group, None)
    log.load()
    return log


def members_of(store: Any) -> dict[str, Member]:
    """Return the members of a dynamic group by name, as the store has them."""
    return {member.name: member for member in log_of(store).view.members.values()}


def add_member(store: Any, like: Worker, name: str, address: str, process: str = "", rank: int = 5) -> Member:
    """Add a member that has no process, with a lease that is not renewed."""
    core = like._worker
    member = core.member._replace(
        id=rank, name=name, incarnation=1 << 32, addresses=[address], host="another host", process=process
    )
    log = log_of(store, like)
    log.store.set(lease_key(rank), sealed_lease(rank, lease_value(member.incarnation, process, 0), core.group))
    assert log.store.compare_set(f"rank/{rank}", None, name) == name
    assert log.append(Join(seat_of(member)))[0]
    return seat_of(member)


@contextlib.contextmanager
def silent_address() -> Iterator[str]:
    """Yield a TCP address that accepts connections and sends nothing.

    A stopped process has such addresses.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp:127.0.0.1:{listening.getsockname()[1]}"


def unused_address() -> str:
    """Return a TCP address at which nothing listens."""
    return f"tcp:127.0.0.1:{free_port()}"
