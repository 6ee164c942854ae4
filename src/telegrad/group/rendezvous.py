"""Rendezvous of a group's members through a c10d store.

The first member chooses the group's token, and its secret unless one was given. In a static group every member writes
its record. Rank 0 waits for all records, removes the secret from the store, and writes the list of members. The other
ranks wait for that list, so the number of store operations grows linearly with the group. The list is the beginning of
the group's log (`telegrad.group.log`). The log of a dynamic group begins without members.
"""

import fcntl
import json
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from torch.distributed import DistError, FileStore  # type: ignore[attr-defined]

from telegrad.errors import TelegradError
from telegrad.group.group_store import GroupStore
from telegrad.group.records import Group, Member, member_key, member_of, record_of, seat_of
from telegrad.group.secret import key_of
from telegrad.group.store_waits import Store, StoreGone, base_of, find, place_of, read_when_written, whole_of, within
from telegrad.protocols.membership import GroupView
from telegrad.waits import Wait

__all__ = [
    "Agreement",
    "Group",
    "GroupEnded",
    "JoinRefused",
    "Member",
    "Outdated",
    "StoreGone",
    "agree",
    "gather_static",
    "has_list",
    "members_of",
]

logger: logging.Logger = logging.getLogger("telegrad")

STATIC_AND_DYNAMIC = "RPC group mixes statically and dynamically initialized members which is not supported."
_ABANDONED = "abandoned"
_AGREEMENT = "agreement"
_MEMBERS = "members"

T = TypeVar("T")


class JoinRefused(TelegradError):
    """The group at this store cannot accept this worker."""


class GroupEnded(JoinRefused):
    """The group at this store has shut down."""

    def __init__(self) -> None:
        super().__init__(
            "the group at this store has ended. Give the next group another store, or another part of it"
            " (torch.distributed.PrefixStore)."
        )


class Outdated(TelegradError):
    """The list of members has an earlier process of this worker.

    That one ended while the group met.
    """


class _Agreement(NamedTuple):
    """Choice of the first member of a group, as stored."""

    static: bool
    world_size: int  # 0: dynamic
    token: str
    key: str  # the random secret; "" if the members were given one, or once all have read it
    ended: bool = False  # all work of the static group is done, and no member can come back


class Agreement(NamedTuple):
    """Group that a worker joins, as its store has it."""

    group: Group
    members: bytes | None  # list of a static group that has begun, see `members_of`


def agree(store: Store, secret: bytes | None, static: bool, world_size: int) -> Agreement:
    """Agree with the other members on the group's token, secret and kind.

    Raises:
        GroupEnded: The group has shut down.
        JoinRefused: The kind of group or its world size differs.
    """
    found, members = find(store, [_AGREEMENT, _MEMBERS])
    mine = _Agreement(static, world_size, secrets.token_hex(16), secrets.token_hex(32) if secret is None else "")
    if found is None:
        found = store.compare_set(_AGREEMENT, "", json.dumps(mine._asdict()))
    return Agreement(_group_of(_Agreement(**json.loads(found)), mine, secret), members)


def _group_of(agreed: _Agreement, mine: _Agreement, secret: bytes | None) -> Group:
    """Return the group of an agreement, if a worker with this choice may join it."""
    static, world_size = mine.static, mine.world_size
    if agreed.static != static:
        raise JoinRefused(STATIC_AND_DYNAMIC)
    if agreed.ended:
        raise GroupEnded
    if agreed.world_size != world_size:
        raise JoinRefused(
            f"this worker was started with world_size={world_size}, but others of the group with"
            f" world_size={agreed.world_size}. Start all workers with the same world_size."
        )
    if secret is not None:
        return Group(agreed.token, key_of(secret, agreed.token), False)
    # If the first member was given a secret, members without one cannot connect to it.
    return Group(agreed.token, bytes.fromhex(agreed.key or mine.key), True)


def _agreed(store: Store) -> _Agreement | None:
    """Return the first member's choice, or None before there is one."""
    return _Agreement(**json.loads(store.get(_AGREEMENT))) if store.check([_AGREEMENT]) else None


def has_met(store: Store) -> bool:
    """Return whether the first member of a group has begun to join at this store."""
    return bool(store.check([_AGREEMENT]))


def world_size_of(store: Store) -> int:
    """Return the world size of the first member; 0 for a dynamic group."""
    agreed = _agreed(store)
    return 0 if agreed is None else agreed.world_size


def is_store_of(store: Store, group: Group) -> bool:
    """Return whether a group has met at this store."""
    agreed = _agreed(store)
    return agreed is not None and agreed.token == group.token


def has_ended(store: Store) -> bool:
    """Return whether a static group at this store has shut down."""
    agreed = _agreed(store)
    return agreed is not None and agreed.ended


def has_rank_0(store: Store) -> bool:
    """Return whether rank 0 of a static group has begun to join."""
    return bool(store.check(["rank/0"]))


def members_of(written: bytes, group: Group) -> list[Member]:
    """Return the members of a list that rank 0 of a static group has written.

    Raises:
        TelegradError: The group failed to begin, or a record was not made with the group's secret.
    """
    found = json.loads(written)
    if "failed" in found:
        raise TelegradError(found["failed"])
    return [member_of(rank, record, group) for rank, record in enumerate(found["members"])]


def has_list(store: Store) -> bool:
    """Return whether rank 0 of a static group has written the members or a failure."""
    return bool(store.check([_MEMBERS]))


def is_static(store: Store) -> bool:
    """Return whether a static group meets at this store, and has not ended."""
    agreed = _agreed(store)
    return agreed is not None and agreed.static and not agreed.ended


def mark_failed(store: Store, rank: int, why: str) -> None:
    """Publish that a rank will not join, unless another worker has it."""
    failure = json.dumps({"failed": f"the worker with rank {rank} failed to join: {why}", "rank": rank})
    if json.loads(store.compare_set(member_key(rank), "", failure)).get("rank") != rank:
        return
    # Neither rank 0 nor the others must wait for the remaining ranks.
    agreed = _agreed(store)
    for other in range(agreed.world_size if agreed else 0):
        store.compare_set(member_key(other), "", failure)
    store.compare_set(_MEMBERS, "", failure)


def gather_static(store: Store, member: Member, group: Group, world_size: int, wait: Wait) -> list[Member]:
    """Write this member's record and wait for all others.

    Raises:
        RuntimeError: A member failed, timed out, has the name of another member, or another secret.
    """
    store.set(member_key(member.id), json.dumps(record_of(member, group)))
    if member.id == 0:
        written = _collect(store, member, group, world_size, wait)
    else:
        written = _wait_for_list(store, member, world_size, wait)
    return members_of(written, group)


def _collect(store: Store, member: Member, group: Group, world_size: int, wait: Wait) -> bytes:
    """Write the list of members, or a failure, as rank 0."""
    keys = [member_key(rank) for rank in range(world_size)]
    try:
        found = read_when_written(store, keys, wait, lambda: _absent(store, world_size))
        if found is None:
            raise _timeout_error(store, member, world_size, wait.timeout)
        written = [json.loads(each) for each in found]
        failed = next((each for each in written if "failed" in each), None)
        if failed is None:
            GroupView(world_size).found(
                [seat_of(member_of(rank, record, group)) for rank, record in enumerate(written)]
            )
        _forget_secret(store, group, world_size)  # all members that have written a record have the secret
    except BaseException as e:
        with suppress(RuntimeError):
            store.compare_set(
                _MEMBERS, "", json.dumps({"failed": str(e) or f"worker {member.name} has been interrupted"})
            )
        raise
    return bytes(store.compare_set(_MEMBERS, "", json.dumps(failed or {"members": written})))


def _forget_secret(store: Store, group: Group, world_size: int) -> None:
    """Remove the secret of a static group from its store."""
    if not group.shared_secret:
        return
    store.set(_AGREEMENT, json.dumps(_Agreement(True, world_size, group.token, "")._asdict()))
    if place := getattr(whole_of(store)[0], "remote_place", ""):
        logger.warning(
            "the random secret of the group remains in the history of etcd at %s: any process that can read etcd may"
            " become a member. Set TELEGRAD_SECRET (or the option secret) on all workers.",
            place,
        )
    base = base_of(store)
    if isinstance(base, FileStore):  # a file store appends and keeps old values
        path: str = base.path  # type: ignore[attr-defined]
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as torch's file store does
            secret = group.secret.hex().encode()
            at = file.read().find(secret)
            if at >= 0:
                file.seek(at)
                file.write(b"0" * len(secret))


def _wait_for_list(store: Store, member: Member, world_size: int, wait: Wait) -> bytes:
    """Wait for the list of members, as another rank than 0."""
    found = read_when_written(store, [_MEMBERS], wait, lambda: _absent(store, world_size))
    if found is None:
        raise _timeout_error(store, member, world_size, wait.timeout)
    return bytes(found[0])


def _timeout_error(store: Store, member: Member, world_size: int, timeout: float) -> TelegradError:
    missing = _missing(store, 0, world_size)
    return TelegradError(
        f"worker {member.name} (rank {member.id}) waited {timeout:g} s for the other workers; those with rank"
        f" {', '.join(map(str, missing or [0]))} of {world_size} did not join. Are they started, with this init_method?"
    )


def _absent(store: Store, world_size: int) -> tuple[str, str]:
    """Return the missing ranks, and how many have joined, for `Wait.step`."""
    missing = _missing(store, 0, world_size)
    others = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing or [0]))}"
    place = place_of(store)
    return f"{others} of {world_size}{f' at {place}' if place else ''}", f"{world_size - len(missing)} have joined"


def _missing(store: Store, first: int, end: int) -> list[int]:
    """Return the missing ranks of a range, with few store operations for few ranks."""
    if store.check([f"member/{rank}" for rank in range(first, end)]):
        return []
    if end - first == 1:
        return [first]
    middle = (first + end) // 2
    return _missing(store, first, middle) + _missing(store, middle, end)


def mark_ended(store: GroupStore, group: Group, world_size: int, timeout: float) -> None:
    """Publish as rank 0 that all work of a static group is done.

    Its store may remain. Then a worker of the next group must not take it for a group to come back to.

    Args:
        store: Store of the group.
        group: Token of the group.
        world_size: Its number of members.
        timeout: Limit in seconds.
    """
    ended = json.dumps(_Agreement(True, world_size, group.token, "", True)._asdict())
    _while_leaving(timeout, lambda: store.set(_AGREEMENT, ended))


def mark_abandoned(store: GroupStore, timeout: float) -> None:
    """Publish that this worker leaves after a timeout.

    Then no worker can finish a shutdown that includes all workers.

    Args:
        store: Store of the group.
        timeout: Limit in seconds.
    """
    _while_leaving(timeout, lambda: store.set(_ABANDONED, "1"))


def is_abandoned(store: GroupStore, timeout: float) -> bool:
    """Return whether a worker has left the group after a timeout.

    Args:
        store: Store of the group.
        timeout: Limit in seconds; 0 for none.
    """
    return _while_leaving(timeout, lambda: store.get(_ABANDONED)) is not None


def _while_leaving(timeout: float, operation: Callable[[], T]) -> T | None:
    """Run a store operation of a worker that leaves whether or not it succeeds.

    The store may be gone, and with it the workers that would read the key. Any other error is logged.

    Args:
        timeout: Limit in seconds; 0 for none.
        operation: The operation.

    Returns:
        Its result; None if it has failed.
    """
    try:
        return within(timeout, operation)
    except (DistError, OSError):
        pass
    except Exception as e:
        if type(e) is not RuntimeError:  # of a store of torch
            logger.warning("a worker leaves its group, and its last use of the store failed: %r", e, exc_info=e)
    return None
