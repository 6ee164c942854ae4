"""Torch's module of helpers for dynamic groups."""

import logging
from contextlib import AbstractContextManager
from typing import NoReturn

from telegrad.group import rendezvous
from telegrad.group.store_waits import Store

logger = logging.getLogger("telegrad")


def _group_membership_management(store: Store, name: str, is_join: bool) -> AbstractContextManager[None]:
    """Lock the membership of the group: no other worker joins or leaves in the block."""
    return rendezvous.membership_lock(store, name, is_join)


def _update_group_membership(*_: object) -> NoReturn:
    raise NotImplementedError("Telegrad's workers manage their group; its members cannot be set.")
