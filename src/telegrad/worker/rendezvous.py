"""How the members of a group find each other: through a c10d store.

Every member writes who and where it is, and reads who and where the others are. The first member chooses the group's
token, and its secret unless one was given. In a static group all wait for all; a dynamic one keeps a list, guarded by a
token as torch does it, and each change is told to the members that are there.
"""

import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from telegrad.errors import TelegradError
from telegrad.protocols import membership as protocol
from telegrad.protocols.membership import GroupView
from telegrad.worker.budget import Budget

__all__ = [
    "Group",
    "Member",
    "StoreGone",
    "agree",
    "check_members",
    "gather_static",
    "membership",
    "read_members",
    "write_members",
]

logger = logging.getLogger("telegrad")

STATIC_AND_DYNAMIC = "RPC group mixes statically and dynamically initialized members which is not supported."
_LOCK = "RpcGroupManagementToken"

StoreGone: type[RuntimeError] = dist.DistNetworkError
"""What using a store raises whose host has gone."""


class Member(NamedTuple):
    """What a worker tells the others about itself."""

    id: int
    name: str
    incarnation: int
    addresses: list[str]
    host: str  # see addresses.host_key
    devices: tuple[Any, ...] = (0, (), {})  # see devices.Devices; as a static group exchanges them


class Group(NamedTuple):
    """What all members of a group agree on."""

    token: str  # tells this group from others
    secret: bytes
    shared_secret: bool  # the secret came through the store


def _first(store: Any, key: str, mine: str) -> str:
    """The value of the first one to write a key."""
    return bytes(store.compare_set(key, "", mine)).decode()


def agree(store: Any, secret: bytes | None, static: bool, world_size: int) -> Group:
    """Agrees on the group's token, its secret and its kind.

    Raises:
        RuntimeError: a member joins in another way, or expects another number of workers.
    """
    if _first(store, "mode", "static" if static else "dynamic") != ("static" if static else "dynamic"):
        raise TelegradError(STATIC_AND_DYNAMIC)
    if static:
        expected = _first(store, "world_size", str(world_size))
        if expected != str(world_size):
            raise TelegradError(
                f"this worker was started with world_size={world_size}, but others of the group with"
                f" world_size={expected}. Start all workers with the same world_size."
            )
    token = _first(store, "group", secrets.token_hex(16))
    if secret is not None:
        return Group(token, secret, False)
    return Group(token, bytes.fromhex(_first(store, "secret", secrets.token_hex(32))), True)


def is_static(store: Any) -> bool:
    """Has a static group met here?"""
    return bool(store.check(["mode"])) and bytes(store.get("mode")) == b"static"


def ordinal(store: Any, name: str) -> int:
    """How often a worker of this name has been in the group before."""
    return int(store.add(f"incarnations/{name}", 1)) - 1


def take_rank(store: Any, rank: int, name: str) -> None:
    """Raises RuntimeError if another worker has this rank."""
    mine = f"{name} {secrets.token_hex(8)}"
    taken = _first(store, f"rank/{rank}", mine)
    if taken != mine:
        raise TelegradError(
            f"rank {rank} is taken by worker {taken.partition(' ')[0]}, so worker {name} cannot have it."
            " Give each worker a rank of its own."
        )


def give_up(store: Any, rank: int, why: str) -> None:
    """Tells those who wait that this rank will not come, unless another worker has it.

    It is put down for every rank that has not come: who waits for several must not wait for the others of them first.
    """
    failure = json.dumps({"failed": why, "rank": rank})
    agreed = int(store.get("world_size")) if store.check(["world_size"]) else 0
    if json.loads(store.compare_set(f"member/{rank}", "", failure)).get("rank") != rank:
        return
    for other in range(agreed):
        store.compare_set(f"member/{other}", "", failure)


def gather_static(store: Any, me: Member, world_size: int, timeout: float) -> list[Member]:
    """Writes this member and waits for all others.

    Raises:
        RuntimeError: one of them failed, did not come in time, or has another's name.
    """
    store.set(f"member/{me.id}", json.dumps(me._asdict()))
    try:
        store.wait([f"member/{rank}" for rank in range(world_size)], timedelta(seconds=timeout))
    except RuntimeError as e:
        missing = [rank for rank in range(world_size) if not store.check([f"member/{rank}"])]
        raise TelegradError(
            f"worker {me.name} (rank {me.id}) waited {timeout:g} s for the other workers; those with rank"
            f" {', '.join(map(str, missing))} of {world_size} did not come. Are they started, with this init_method?"
        ) from e
    members = []
    for rank in range(world_size):
        facts = json.loads(store.get(f"member/{rank}"))
        if "failed" in facts:
            raise TelegradError(f"the worker with rank {facts['rank']} failed to join: {facts['failed']}")
        members.append(Member(**facts))
    return members


def check_members(members: list[Member], world_size: int | None) -> GroupView:
    """Raises RuntimeError if they cannot be one group: two have one name or one id, say."""
    view = GroupView(world_size)
    for member in members:
        view.join(protocol.Member(member.name, member.id, 0, world_size, str(member.incarnation)))
    return view


def abandon(store: Any) -> None:
    """This worker's time is up, so it leaves the group before the others: no worker of it can end with all."""
    with suppress(RuntimeError):  # the store has gone: then so have those who would look
        store.set("abandoned", "1")


def is_abandoned(store: Any) -> bool:
    """Has a worker left the group because its time was up?"""
    try:
        return bool(store.check(["abandoned"]))
    except RuntimeError:
        return False


# ---- dynamic groups


@contextmanager
def membership(store: Any, name: str, joining: bool, budget: Budget | None = None) -> Iterator[None]:
    """Nobody else joins or leaves meanwhile.

    Args:
        budget: how long others who join or leave may take; by default each as long as the store waits.

    Raises:
        TelegradError: they take longer.
    """
    mine = f"Token_for_{name}_{'join' if joining else 'leave'}_{secrets.token_hex(4)}"
    while True:
        held = bytes(store.compare_set(_LOCK, "", mine)).decode()
        if held == mine:
            break
        try:
            store.wait([held], *(() if budget is None else (timedelta(seconds=budget.left()),)))
        except StoreGone:
            raise
        except RuntimeError as e:
            raise TelegradError(f"{name} waited for {held}, which does not give the group's lock back") from e
    try:
        yield
    finally:
        store.set(_LOCK, "")
        store.set(mine, "Done")


def read_members(store: Any) -> list[Member]:
    """Who is in the group, as the store has it."""
    if not store.check(["members"]):
        return []
    return [Member(**facts) for facts in json.loads(store.get("members"))]


def write_members(store: Any, members: list[Member]) -> None:
    store.set("members", json.dumps([member._asdict() for member in members]))
