"""Join a group at the address in its options.

The store of the previous group may still exist at that address.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar
from urllib.parse import urlparse

from telegrad.group import stores
from telegrad.group.group_store import outlives_groups
from telegrad.group.store_parts import Part, join_open_part, prefix_of
from telegrad.group.store_waits import Store, StoreGone, place_of
from telegrad.options import RpcBackendOptions

__all__ = ["join_at"]

logger: logging.Logger = logging.getLogger("telegrad")

T = TypeVar("T")

_PAUSE = 0.005  # s until the next attempt to find a store, after one has closed


def join_at(
    name: str,
    options: RpcBackendOptions,
    rank: int,
    world_size: int | None,
    join: Callable[[Part, int, int | None], T],
    ranks_needed: bool = False,
) -> T:
    """Join a group at the store that the options name.

    A client may find the store of the previous group while its host closes it. It then looks for the store again.

    Args:
        name, rank, world_size, ranks_needed: as for `stores.meet`.
        join: joins in a part of the store, with the rank and the world size that the address may have added. It is
            called again if the store closes in the meantime, or if the group of the part has ended.

    Returns:
        The result of `join`.

    Raises:
        StoreGone: the store was lost.
        ValueError, RuntimeError: as of `stores.meet` and `join`.
    """
    until = time.monotonic() + stores.rendezvous_timeout(options)
    limit: float | None = None
    gone: RuntimeError | None = None
    place, prefix = _address_of(options.init_method), ""
    with ExitStack() as joining:
        while True:
            try:
                store, its_rank, its_size = stores.meet(name, options, rank, world_size, ranks_needed, limit)
            except StoreGone as timed_out:
                if gone is None:
                    raise
                raise timed_out from gone
            try:
                if not prefix:  # the group keeps its prefix, at whichever store it meets
                    prefix = joining.enter_context(prefix_of(store, place, its_size, its_rank))
                return join_open_part(store, place, prefix, join, its_rank, its_size)
            except StoreGone as e:
                limit = round(until - time.monotonic(), 2)
                if outlives_groups(store):  # the error of etcd says what to do
                    raise
                if limit <= 0 or not stores.is_client(options, rank, world_size):
                    raise _store_lost(name, store, e) from e
                logger.info("%s (rank %d) tries to find the group's store again: %s", name, its_rank, e)
                gone = e.with_traceback(None)  # the traceback refers to the store
            time.sleep(_PAUSE)


def _address_of(init_method: str) -> str:
    """Return an address with what the environment adds."""
    if urlparse(init_method).scheme != "env":
        return init_method
    return f"{init_method}{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _store_lost(name: str, store: Store, error: RuntimeError) -> RuntimeError:
    reason = str(error).partition("\n")[0].rstrip(".?")  # torch adds its stack
    return StoreGone(
        f"worker {name} could not join its group, because the connection to the group's store at {place_of(store)}"
        f" failed: {reason}. The process that hosts the store has ended, or cannot be reached. Start this worker again:"
        " it joins the group that meets at this address then. If members shall outlive the store's host, use etcd."
    )
