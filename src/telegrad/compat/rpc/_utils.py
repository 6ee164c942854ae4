"""Torch's module of helpers for groups whose members come and go."""

import logging
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from telegrad.worker import rendezvous

logger = logging.getLogger("telegrad")


def _group_membership_management(store: Any, name: str, is_join: bool) -> AbstractContextManager[None]:
    """Nobody else joins or leaves meanwhile."""
    return rendezvous.membership(store, name, is_join)


def _update_group_membership(*_: object) -> NoReturn:
    raise NotImplementedError("Telegrad's workers tell each other who joins and leaves; nothing else can.")
