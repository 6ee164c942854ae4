"""Torch's module of helpers for dynamic groups."""

import logging
from typing import NoReturn

logger = logging.getLogger("telegrad")


def _group_membership_management(*_: object) -> NoReturn:
    raise NotImplementedError("Telegrad's workers join and leave without a lock; see telegrad.rpc.init_rpc.")


def _update_group_membership(*_: object) -> NoReturn:
    raise NotImplementedError("Telegrad's workers manage their group; its members cannot be set.")
