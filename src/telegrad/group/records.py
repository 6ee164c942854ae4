"""Records of members in the store, and the group that they agree on.

If the group was given a secret, each record and each entry has a MAC: another process that writes to the store can
neither add or remove a member nor change a member's address.
"""

import hmac
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from telegrad.errors import TelegradError
from telegrad.protocols.membership import Member as Seat

__all__ = ["Group", "Member", "Record", "member_of", "record_of", "sealed", "seat_of", "unsealed"]

_PURPOSE = b"telegrad member record\0"  # unique prefix among the messages authenticated with the secret


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


def record_of(member: Member, group: Group) -> Record:
    """Return the record of a member for the store."""
    return {"facts": member} if group.shared_secret else {"facts": member, "mac": _mac(member, group)}


def member_of(record: Record, group: Group) -> Member:
    """Return the member of a record.

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
    if not hmac.compare_digest(str(mac), _mac(member, group)):
        raise TelegradError(
            f"the record of worker {member.name} (rank {member.id}) in the group's store was not made with the group's"
            " secret: that worker was started with another secret or with none, or another program writes to the store."
            " Give all workers the same secret."
        )
    return member


def seat_of(member: Member) -> Seat:
    """Return a member for the rules, with its record."""
    return Seat(member.name, member.id, member.incarnation, member)


def _mac(member: Sequence[object], group: Group) -> str:
    facts = json.dumps([group.token, *member], sort_keys=True, separators=(",", ":"))
    return hmac.digest(group.secret, _PURPOSE + facts.encode(), "sha256").hex()


def sealed(plain: Sequence[object], group: Group) -> str:
    """Return plain values as text for the store.

    The text has a MAC if the group was given a secret.
    """
    return json.dumps([plain, "" if group.shared_secret else _mac(plain, group)])


def unsealed(text: str | bytes, group: Group | None) -> list[Any]:
    """Return the values of `sealed`. Without a group, do not check the MAC.

    Raises:
        TelegradError: The text was not made with the group's secret.
    """
    try:
        plain, mac = json.loads(text)
        genuine = isinstance(plain, list) and (group is None or _is_genuine(plain, str(mac), group))
    except (TypeError, ValueError, RecursionError):
        genuine = False
    if not genuine:
        raise TelegradError(
            "an entry of the group's store was not made with the group's secret: a worker was started with another"
            " secret or with none, or another program writes to the store. Give all workers the same secret."
        )
    return list(plain)


def _is_genuine(plain: list[Any], mac: str, group: Group) -> bool:
    if group.shared_secret:
        return not mac
    return hmac.compare_digest(mac, _mac(plain, group))
