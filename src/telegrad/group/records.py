"""Records of members in the store, and the group that they agree on.

If the group was given a secret, each record has a MAC: another process that writes to the store can neither add a
member nor change a member's address.
"""

import hmac
import json
from collections.abc import Sequence
from typing import NamedTuple, NotRequired, TypedDict

from telegrad.errors import TelegradError

__all__ = ["Group", "Member", "Record", "member_of", "record_of"]

_PURPOSE = b"telegrad member record\0"  # unique prefix among the messages authenticated with the secret


class Member(NamedTuple):
    """Data of a worker that it publishes to the group."""

    id: int
    name: str
    incarnation: int
    addresses: list[str]
    host: str  # see addresses.host_key
    devices: Sequence[object] = (0, (), {})  # see device_maps.Devices; exchanged in a static group


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


def _mac(member: Member, group: Group) -> str:
    facts = json.dumps([group.token, *member], sort_keys=True, separators=(",", ":"))
    return hmac.digest(group.secret, _PURPOSE + facts.encode(), "sha256").hex()
