"""Log lines about the lifecycle of a worker: joined, connected, peer lost, left.

Each worker logs one line per event through the logger `telegrad`, at INFO, and at WARNING for a loss.
"""

import logging
from typing import Protocol

from telegrad.group.addresses import candidates, transport_of
from telegrad.group.records import Member
from telegrad.options import Options
from telegrad.types import WorkerInfo
from telegrad.worker.membership.members import Members

__all__ = ["connected", "joined", "left", "lost", "peer_left", "why_not_faster"]

logger: logging.Logger = logging.getLogger("telegrad")


class Subject(Protocol):
    """Worker that a line is about."""

    info: WorkerInfo
    members: Members


class Joined(Subject, Protocol):
    """Worker with its own record and options."""

    static: bool
    joined: bool
    member: Member
    host: str
    options: Options


def joined(worker: Joined) -> None:
    """Log that the worker has joined its group."""
    worker.joined = True
    if not logger.isEnabledFor(logging.INFO):
        return
    others = len(worker.members.ids())
    group = f"of {others + 1}" if worker.static else f"of a dynamic group with {others} others"
    at = ", ".join(a if a.startswith(("tcp:", "tls:")) else a.partition(":")[0] for a in worker.member.addresses)
    logger.info("worker %s joined as rank %d %s; it listens on %s", worker.info.name, worker.info.id, group, at)


def connected(worker: Joined, peer: int, text: str) -> None:
    """Log the first link to a peer.

    Args:
        worker: The local worker.
        peer: Id of the peer.
        text: Name of the peer, "to" or "from", and the address (`Engine::opened`).
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    name, direction, address = text.split(" ", 2)
    scheme, _, place = address.partition(":")
    transport = transport_of(scheme)
    where = f", {direction} {place}" if transport == "tcp" and place else ""
    why = why_not_faster(worker, peer, name, transport)
    because = f" ({why})" if why else ""
    logger.info("worker %s is connected to %s over %s%s%s", worker.info.name, name, scheme, where, because)


def why_not_faster(worker: Joined, peer: int, name: str, transport: str) -> str:
    """Return why no preferred transport is used; "" if the options prefer none."""
    mine = worker.options.transports
    better = mine[: mine.index(transport)] if transport in mine else ()
    member = worker.members.get(peer)
    if not better or member is None:
        return ""
    same_host = member.host == worker.host
    if candidates(member.addresses, same_host, better):
        return f"not {' or '.join(better)}: the attempt failed; the worker that connected logs why"
    if not same_host and candidates(member.addresses, True, better):
        return f"not {' or '.join(better)}: {name} is on another host, or in another network namespace"
    return f"not {' or '.join(better)}: {name} does not listen there, by its option transports"


def lost(worker: Subject, peer: int, why: str, again: bool = False) -> None:
    """Log the loss of a peer that sent no goodbye, once per loss."""
    level = logging.DEBUG if again else logging.WARNING
    logger.log(level, "worker %s is lost to %s: %s", worker.members.name_of(peer), worker.info.name, why)


def peer_left(worker: Subject, peer: int, why: str) -> None:
    """Log that a peer has left, by its goodbye or by agreement of the members."""
    logger.info("worker %s is gone from the group of %s: %s", worker.members.name_of(peer), worker.info.name, why)


def left(worker: Subject) -> None:
    """Log that the worker has left its group."""
    logger.info("worker %s left its group", worker.info.name)
