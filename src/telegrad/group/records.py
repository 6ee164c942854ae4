"""Records of members in the store, and the group that they agree on.

If the group was given a secret, each record and each other value that decides about members has a MAC: another process
that writes to the store can neither add or remove a member nor change a member's address. The MAC covers the key, so a
value that was copied to another key is as worthless as a forged one.
"""

import hmac
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar

from telegrad.errors import TelegradError
from telegrad.protocols.membership import Member as Seat

__all__ = [
    "Group",
    "Member",
    "Record",
    "member_key",
    "member_of",
    "read_member",
    "record_of",
    "sealed",
    "seat_of",
    "unsealed",
]

T = TypeVar("T")

_PURPOSE = b"telegrad member record\0"  # unique prefix among the messages authenticated with the secret
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Member(NamedTuple):
    """Data of a worker that it publishes to the group."""

    id: int
    name: str
    incarnation: int
    addresses: list[str]
    host: str  # see addresses.host_key
    devices: Sequence[object] = (0, (), {})  # see device_maps.Devices; exchanged in a static group
    process: str = ""  # see process_identity


class Record(TypedDict):
    """Record of a member in the store."""

    facts: Member  # in the store, a list
    mac: NotRequired[str]


class Group(NamedTuple):
    """Data that all members of a group agree on."""

    token: str  # distinguishes this group from others
    secret: bytes
    shared_secret: bool  # the secret came through the store

    def __repr__(self) -> str:
        return f"Group(token={self.token!r}, shared_secret={self.shared_secret})"


def member_key(rank: int) -> str:
    """Return the key of the record of a rank of a static group."""
    return f"member/{rank}"


def record_of(member: Member, group: Group) -> Record:
    """Return the record of a member for the store."""
    if group.shared_secret:
        return {"facts": member}
    return {"facts": member, "mac": _mac(member_key(member.id), member, group)}


def read_member(facts: Sequence[Any]) -> Member:
    """Return a member from its facts in the store.

    Raises:
        TypeError, ValueError: These are no facts of a member.
    """
    member = Member(*facts)
    texts = member.name, member.host, member.process, *member.addresses
    if not all(isinstance(each, str) for each in texts):
        raise TypeError("a text of a member is none")
    return member._replace(id=int(member.id), incarnation=int(member.incarnation))


def member_of(rank: int, record: Record, group: Group) -> Member:
    """Return the member of the record of a rank.

    Raises:
        TelegradError: The record was made with another secret than the group's, or without a secret.
    """
    member = Member(*record["facts"])
    mac = record.get("mac")
    if group.shared_secret:
        if mac is None:
            return member
        raise TelegradError(
            f"worker {member.name} (rank {member.id}) was started with a secret, but others of the group without one."
            " Give all workers the same secret, or none."
        )
    if not hmac.compare_digest(str(mac), _mac(member_key(rank), member, group)):
        raise TelegradError(
            f"the record of worker {member.name} (rank {member.id}) in the group's store was not made with the group's"
            " secret: that worker was started with another secret or with none, or another program writes to the store."
            " Give all workers the same secret."
        )
    return member


def seat_of(member: Member) -> Seat:
    """Return a member for the rules, with its record."""
    return Seat(member.name, member.id, member.incarnation, member)


def _mac(key: str, plain: Sequence[object], group: Group) -> str:
    facts = json.dumps([group.token, key, *plain], sort_keys=True, separators=(",", ":"))
    return hmac.digest(group.secret, _PURPOSE + facts.encode(), "sha256").hex()


def sealed(key: str, plain: Sequence[object], group: Group) -> str:
    """Return plain values as text for a key of the store.

    The text has a MAC if the group was given a secret.
    """
    return json.dumps([plain, "" if group.shared_secret else _mac(key, plain, group)])


def unsealed(key: str, text: str | bytes, group: Group | None, read: Callable[..., T]) -> T:
    """Return the values of `sealed`, as `read` returns them.

    Args:
        key: Key at which the text was found.
        text: The text.
        group: Token and secret of the group; None to read the values without checking their origin.
        read: Called with the values. Its errors mean that they have another form.

    Raises:
        TelegradError: The text was not made with the group's secret, or not for this key, or has another form.
    """
    with suppress(*_MALFORMED):
        plain, mac = json.loads(text)
        if isinstance(plain, list) and (group is None or _is_genuine(key, plain, str(mac), group)):
            return read(*plain)
    raise TelegradError(
        f"the value of {key} in the group's store was not made with the group's secret: a worker was started with"
        " another secret, with none or with another version of Telegrad, or another program writes to the store. Give"
        " all workers the same secret."
    )


def _is_genuine(key: str, plain: list[Any], mac: str, group: Group) -> bool:
    if group.shared_secret:
        return not mac
    return hmac.compare_digest(mac, _mac(key, plain, group))
