"""Rendezvous of a group's members through a c10d store.

The first member chooses the group's token, and its secret unless one was given. In a static group every member writes
its record. Rank 0 waits for all records, removes the secret from the store, and writes the list of members. The other
ranks wait for that list, so the number of store operations grows linearly with the group. A dynamic group keeps a list
that is guarded by a lock, as in torch, and each change is sent to the present members.
"""

import fcntl
import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from torch.distributed import FileStore  # type: ignore[attr-defined]

from telegrad.errors import TelegradError
from telegrad.group.records import Group, Member, Record, member_of, record_of
from telegrad.group.store_waits import Store, StoreGone, base_of, place_of, wait_for_keys, within
from telegrad.protocols import membership as protocol
from telegrad.protocols.membership import GroupView
from telegrad.timeouts import SharedDeadline
from telegrad.waits import Wait

__all__ = [
    "Group",
    "JoinRefused",
    "Member",
    "StoreGone",
    "agree",
    "check_members",
    "gather_static",
    "has_members",
    "membership_lock",
    "read_members",
    "write_members",
]

logger: logging.Logger = logging.getLogger("telegrad")

STATIC_AND_DYNAMIC = "RPC group mixes statically and dynamically initialized members which is not supported."
_LOCK = "RpcGroupManagementToken"
_AGREEMENT = "agreement"
_MEMBERS = "members"


class JoinRefused(TelegradError):
    """The group at this store cannot accept this worker."""


class _Agreement(NamedTuple):
    """Choice of the first member of a group, as stored."""

    static: bool
    world_size: int  # 0: dynamic
    token: str
    key: str  # the random secret; "" if the members were given one, or once all have read it


def _first(store: Store, key: str, mine: str) -> str:
    """Write a key unless it exists, and return its value."""
    return bytes(store.compare_set(key, "", mine)).decode()


def agree(store: Store, secret: bytes | None, static: bool, world_size: int) -> Group:
    """Agree with the other members on the group's token, secret and kind.

    Raises:
        JoinRefused: The kind of group or its world size differs.
    """
    mine = _Agreement(static, world_size, secrets.token_hex(16), secrets.token_hex(32) if secret is None else "")
    agreed = _Agreement(**json.loads(_first(store, _AGREEMENT, json.dumps(mine._asdict()))))
    if agreed.static != static:
        raise JoinRefused(STATIC_AND_DYNAMIC)
    if agreed.world_size != world_size:
        raise JoinRefused(
            f"this worker was started with world_size={world_size}, but others of the group with"
            f" world_size={agreed.world_size}. Start all workers with the same world_size."
        )
    if secret is not None:
        return Group(agreed.token, secret, False)
    # If the first member was given a secret, members without one cannot connect to it.
    return Group(agreed.token, bytes.fromhex(agreed.key or mine.key), True)


def _agreed(store: Store) -> _Agreement | None:
    """Return the first member's choice, or None before there is one."""
    return _Agreement(**json.loads(store.get(_AGREEMENT))) if store.check([_AGREEMENT]) else None


def has_rank_0(store: Store) -> bool:
    """Return whether rank 0 of a static group has begun to join."""
    return bool(store.check(["rank/0"]))


def has_list(store: Store) -> bool:
    """Return whether rank 0 of a static group has written the members or a failure."""
    return bool(store.check([_MEMBERS]))


def is_static(store: Store) -> bool:
    """Return whether a static group has met at this store."""
    agreed = _agreed(store)
    return agreed is not None and agreed.static


def ordinal(store: Store, name: str) -> int:
    """Return how often a worker with this name has joined before."""
    return int(store.add(f"incarnations/{name}", 1)) - 1


def take_rank(store: Store, rank: int, name: str) -> None:
    """Reserve a rank.

    Raises:
        JoinRefused: Another worker has the rank.
    """
    mine = f"{name} {secrets.token_hex(8)}"
    taken = _first(store, f"rank/{rank}", mine)
    if taken != mine:
        raise JoinRefused(
            f"rank {rank} is taken by worker {taken.partition(' ')[0]}, so worker {name} cannot have it."
            " Give each worker a rank of its own."
        )


def mark_failed(store: Store, rank: int, why: str) -> None:
    """Publish that a rank will not join, unless another worker has it."""
    failure = json.dumps({"failed": f"the worker with rank {rank} failed to join: {why}", "rank": rank})
    if json.loads(store.compare_set(f"member/{rank}", "", failure)).get("rank") != rank:
        return
    # Neither rank 0 nor the others must wait for the remaining ranks.
    agreed = _agreed(store)
    for other in range(agreed.world_size if agreed else 0):
        store.compare_set(f"member/{other}", "", failure)
    store.compare_set(_MEMBERS, "", failure)


def gather_static(store: Store, member: Member, group: Group, world_size: int, wait: Wait) -> list[Member]:
    """Write this member's record and wait for all others.

    Raises:
        RuntimeError: A member failed, timed out, has the name of another member, or another secret.
    """
    store.set(f"member/{member.id}", json.dumps(record_of(member, group)))
    if member.id == 0:
        written = _collect(store, member, group, world_size, wait)
    else:
        written = _wait_for_list(store, member, world_size, wait)
    found = json.loads(written)
    if "failed" in found:
        raise TelegradError(found["failed"])
    return [member_of(record, group) for record in found["members"]]


def _collect(store: Store, member: Member, group: Group, world_size: int, wait: Wait) -> bytes:
    """Write the list of members, or a failure, as rank 0."""
    keys = [f"member/{rank}" for rank in range(world_size)]
    try:
        if not wait_for_keys(store, keys, wait, lambda: _absent(store, world_size)):
            raise _timeout_error(store, member, world_size, wait.timeout)
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        written = [json.loads(each) for each in found]
        failed = next((each for each in written if "failed" in each), None)
        if failed is None:
            check_members([member_of(record, group) for record in written], world_size)
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
    if not wait_for_keys(store, [_MEMBERS], wait, lambda: _absent(store, world_size)):
        raise _timeout_error(store, member, world_size, wait.timeout)
    return bytes(store.get(_MEMBERS))


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


def check_members(members: list[Member], world_size: int | None) -> GroupView:
    """Check that members form a group, with unique names and ids.

    Raises:
        RuntimeError: They do not.
    """
    view = GroupView(world_size)
    for member in members:
        view.join(protocol.Member(member.name, member.id, 0, world_size, str(member.incarnation)))
    return view


def mark_abandoned(store: Store, timeout: float) -> None:
    """Publish that this worker leaves after a timeout.

    Then no worker can finish a shutdown that includes all workers.

    Args:
        store: Store of the group.
        timeout: Limit in seconds.
    """
    with suppress(RuntimeError):  # the store is gone, and with it the workers that would read the key
        within(timeout, lambda: store.set("abandoned", "1"))


def is_abandoned(store: Store, timeout: float) -> bool:
    """Return whether a worker has left the group after a timeout.

    Args:
        store: Store of the group.
        timeout: Limit in seconds; 0 for none.
    """
    try:
        return within(timeout, lambda: bool(store.check(["abandoned"])))
    except RuntimeError:
        return False


# ---- dynamic groups


@contextmanager
def membership_lock(store: Store, name: str, joining: bool, budget: SharedDeadline | None = None) -> Iterator[None]:
    """Hold the lock of the group's membership: no other worker joins or leaves.

    Args:
        store: Store of the group.
        name: Name of this worker.
        joining: This worker joins; otherwise it leaves.
        budget: Deadline for the lock; by default the store's timeout for each holder.

    Raises:
        TelegradError: The lock was not released in time.
    """
    mine = f"Token_for_{name}_{'join' if joining else 'leave'}_{secrets.token_hex(4)}"
    while True:
        held = bytes(store.compare_set(_LOCK, "", mine)).decode()
        if held == mine:
            break
        wait = Wait(name, store.timeout.total_seconds() if budget is None else budget.left())
        if not wait_for_keys(store, [held], wait, lambda held=held: _holder(store, held)):  # type: ignore[misc]
            raise TelegradError(f"{name} waited for {held}, which does not release the group's lock")
    try:
        yield
    finally:
        store.set(_LOCK, "")
        store.set(mine, "Done")


def _holder(store: Store, held: str) -> tuple[str, str]:
    """Return the holder of the lock, for `Wait.step`."""
    name, _, what = held.removeprefix("Token_for_").rpartition("_")[0].rpartition("_")
    place = place_of(store)
    return f"{name} to {what} the group{f' at {place}' if place else ''}", "it has the group's lock"


def has_members(store: Store) -> bool:
    """Return whether the group has members."""
    return bool(_records(store))


def read_members(store: Store, group: Group) -> list[Member]:
    """Return the members in the store.

    Raises:
        TelegradError: A record was not made with the group's secret.
    """
    return [member_of(record, group) for record in _records(store)]


def write_members(store: Store, members: list[Member], group: Group) -> None:
    store.set(_MEMBERS, json.dumps([record_of(member, group) for member in members]))


def _records(store: Store) -> list[Record]:
    found: list[Record] = json.loads(store.get(_MEMBERS)) if store.check([_MEMBERS]) else []
    return found
