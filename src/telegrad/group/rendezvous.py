"""How the members of a group find each other: through a c10d store.

The first member chooses the group's token, and its secret unless one was given. In a static group every member writes
who and where it is; rank 0 waits for all of them, takes the secret out of the store again, and writes the list, for
which the others wait, so that uses of the store grow as the group does. A dynamic group keeps a list, guarded by a
token as torch does it, and each change is told to the members that are there.
"""

import fcntl
import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch.distributed import FileStore  # type: ignore[attr-defined]

from telegrad.errors import TelegradError
from telegrad.group.records import Group, Member, member_of, record_of
from telegrad.group.store_waits import StoreGone, base_of, place_of, wait_for_keys, within
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
    """The group that meets here cannot have this worker."""


class _Agreement(NamedTuple):
    """What the first member of a group chooses, as it stands in the store."""

    static: bool
    world_size: int  # 0: dynamic
    token: str
    key: str  # the random secret; "": the members have one of their own, or all of a static group have this one


def _first(store: Any, key: str, mine: str) -> str:
    """The value of the first one to write a key."""
    return bytes(store.compare_set(key, "", mine)).decode()


def agree(store: Any, secret: bytes | None, static: bool, world_size: int) -> Group:
    """Agrees on the group's token, its secret and its kind.

    Raises:
        Refused: a member joins in another way, or expects another number of workers.
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
    # Whoever came first may have a secret of its own: then those who have none cannot talk to it.
    return Group(agreed.token, bytes.fromhex(agreed.key or mine.key), True)


def _agreed(store: Any) -> _Agreement | None:
    """What the first member chose, if one has come."""
    return _Agreement(**json.loads(store.get(_AGREEMENT))) if store.check([_AGREEMENT]) else None


def has_rank_0(store: Any) -> bool:
    """Has the worker with rank 0 of a static group begun to join it?"""
    return bool(store.check(["rank/0"]))


def has_list(store: Any) -> bool:
    """Has rank 0 of a static group said who is in it, or why there is none?"""
    return bool(store.check([_MEMBERS]))


def is_static(store: Any) -> bool:
    """Has a static group met here?"""
    agreed = _agreed(store)
    return agreed is not None and agreed.static


def ordinal(store: Any, name: str) -> int:
    """How often a worker of this name has been in the group before."""
    return int(store.add(f"incarnations/{name}", 1)) - 1


def take_rank(store: Any, rank: int, name: str) -> None:
    """Raises Refused if another worker has this rank."""
    mine = f"{name} {secrets.token_hex(8)}"
    taken = _first(store, f"rank/{rank}", mine)
    if taken != mine:
        raise JoinRefused(
            f"rank {rank} is taken by worker {taken.partition(' ')[0]}, so worker {name} cannot have it."
            " Give each worker a rank of its own."
        )


def mark_failed(store: Any, rank: int, why: str) -> None:
    """Tells those who wait that this rank will not come, unless another worker has it."""
    failure = json.dumps({"failed": f"the worker with rank {rank} failed to join: {why}", "rank": rank})
    if json.loads(store.compare_set(f"member/{rank}", "", failure)).get("rank") != rank:
        return
    # Rank 0 must not wait for the others of those who have not come first, and the others not for rank 0.
    agreed = _agreed(store)
    for other in range(agreed.world_size if agreed else 0):
        store.compare_set(f"member/{other}", "", failure)
    store.compare_set(_MEMBERS, "", failure)


def gather_static(store: Any, member: Member, group: Group, world_size: int, wait: Wait) -> list[Member]:
    """Writes this member and waits for all others.

    Raises:
        RuntimeError: one of them failed, did not come in time, has another's name, or another secret.
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


def _collect(store: Any, member: Member, group: Group, world_size: int, wait: Wait) -> bytes:
    """Rank 0: makes the list for all, or says why there is none."""
    keys = [f"member/{rank}" for rank in range(world_size)]
    try:
        if not wait_for_keys(store, keys, wait, lambda: _absent(store, world_size)):
            raise _timeout_error(store, member, world_size, wait.timeout)
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        written = [json.loads(each) for each in found]
        failed = next((each for each in written if "failed" in each), None)
        if failed is None:
            check_members([member_of(record, group) for record in written], world_size)
        _forget_secret(store, group, world_size)  # all have it who have written themselves
    except BaseException as e:
        with suppress(RuntimeError):
            store.compare_set(
                _MEMBERS, "", json.dumps({"failed": str(e) or f"worker {member.name} has been interrupted"})
            )
        raise
    return bytes(store.compare_set(_MEMBERS, "", json.dumps(failed or {"members": written})))


def _forget_secret(store: Any, group: Group, world_size: int) -> None:
    """Takes the secret of a static group out of its store."""
    if not group.shared_secret:
        return
    store.set(_AGREEMENT, json.dumps(_Agreement(True, world_size, group.token, "")._asdict()))
    base = base_of(store)
    if isinstance(base, FileStore):  # which keeps what was there before
        path: str = base.path  # type: ignore[attr-defined]
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as its users do
            secret = group.secret.hex().encode()
            at = file.read().find(secret)
            if at >= 0:
                file.seek(at)
                file.write(b"0" * len(secret))


def _wait_for_list(store: Any, member: Member, world_size: int, wait: Wait) -> bytes:
    """The other ranks."""
    if not wait_for_keys(store, [_MEMBERS], wait, lambda: _absent(store, world_size)):
        raise _timeout_error(store, member, world_size, wait.timeout)
    return bytes(store.get(_MEMBERS))


def _timeout_error(store: Any, member: Member, world_size: int, timeout: float) -> TelegradError:
    missing = _missing(store, 0, world_size)
    return TelegradError(
        f"worker {member.name} (rank {member.id}) waited {timeout:g} s for the other workers; those with rank"
        f" {', '.join(map(str, missing or [0]))} of {world_size} did not come. Are they started, with this init_method?"
    )


def _absent(store: Any, world_size: int) -> tuple[str, str]:
    """Who is waited for, and how far the group has come; see `Wait.step`."""
    missing = _missing(store, 0, world_size)
    others = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing or [0]))}"
    place = place_of(store)
    return f"{others} of {world_size}{f' at {place}' if place else ''}", f"{world_size - len(missing)} have come"


def _missing(store: Any, first: int, end: int) -> list[int]:
    """Which ranks from the first to the end have not come; few uses of the store if these are few."""
    if store.check([f"member/{rank}" for rank in range(first, end)]):
        return []
    if end - first == 1:
        return [first]
    middle = (first + end) // 2
    return _missing(store, first, middle) + _missing(store, middle, end)


def check_members(members: list[Member], world_size: int | None) -> GroupView:
    """Raises RuntimeError if they cannot be one group: two have one name or one id, say."""
    view = GroupView(world_size)
    for member in members:
        view.join(protocol.Member(member.name, member.id, 0, world_size, str(member.incarnation)))
    return view


def mark_abandoned(store: Any, timeout: float) -> None:
    """This worker's time is up, so it leaves the group before the others: no worker of it can end with all.

    Args:
        timeout: seconds that it may take to say so.
    """
    with suppress(RuntimeError):  # the store has gone: then so have those who would look
        within(timeout, lambda: store.set("abandoned", "1"))


def is_abandoned(store: Any, timeout: float) -> bool:
    """Has a worker left the group because its time was up?

    Args:
        timeout: seconds that the store may take to say so; 0 is no limit.
    """
    try:
        return within(timeout, lambda: bool(store.check(["abandoned"])))
    except RuntimeError:
        return False


# ---- dynamic groups


@contextmanager
def membership_lock(store: Any, name: str, joining: bool, budget: SharedDeadline | None = None) -> Iterator[None]:
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
        wait = Wait(name, store.timeout.total_seconds() if budget is None else budget.left())
        if not wait_for_keys(store, [held], wait, lambda held=held: _holder(store, held)):  # type: ignore[misc]
            raise TelegradError(f"{name} waited for {held}, which does not give the group's lock back")
    try:
        yield
    finally:
        store.set(_LOCK, "")
        store.set(mine, "Done")


def _holder(store: Any, held: str) -> tuple[str, str]:
    """Who has the lock; see `Wait.step`."""
    name, _, what = held.removeprefix("Token_for_").rpartition("_")[0].rpartition("_")
    place = place_of(store)
    return f"{name} to {what} the group{f' at {place}' if place else ''}", "it has the group's lock"


def has_members(store: Any) -> bool:
    """Is anybody in the group?"""
    return bool(_records(store))


def read_members(store: Any, group: Group) -> list[Member]:
    """Who is in the group, as the store has it.

    Raises:
        TelegradError: a record was not made with the group's secret.
    """
    return [member_of(record, group) for record in _records(store)]


def write_members(store: Any, members: list[Member], group: Group) -> None:
    store.set(_MEMBERS, json.dumps([record_of(member, group) for member in members]))


def _records(store: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(store.get(_MEMBERS)) if store.check([_MEMBERS]) else []
    return found
