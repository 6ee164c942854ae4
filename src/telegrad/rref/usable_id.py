"""Ids of references, for requests that carry the id only."""

from typing import Any

from telegrad.protocols.rref import RRefId
from telegrad.rref.rref import RRef

__all__ = ["usable_id"]


def usable_id(rref: RRef[Any]) -> RRefId:
    """Return the id of a value, if the reference to it is usable.

    The request itself would not notice a loss: the next session with the owner has another count of references.

    Raises:
        OwnerLost: The owner is lost.
        RRefDeleted: The worker that held the reference has shut down.
    """
    rref.worker.references.check(rref.id, rref.owner_id)
    return rref.id
