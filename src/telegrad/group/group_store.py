"""Interface of the stores that hold the membership of a group.

A store holds values, counters, the log of epochs and leases. The store of torch, also over a Unix socket, is the
default (`C10dStore`). `telegrad.group.etcd_store` has the implementation on etcd.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from telegrad.group.probing import probe
from telegrad.group.store_waits import Part, Store, StoreGone, StoreUnresponsive, base_of, find, whole_of, within
from telegrad.group.unix_store import LocalStore

__all__ = ["C10dStore", "GroupStore", "group_store_of", "log_key", "outlives_groups"]

logger: logging.Logger = logging.getLogger("telegrad")

T = TypeVar("T")


def log_key(epoch: int) -> str:
    """Return the key of the entry of an epoch."""
    return f"log/{epoch:010}"


class GroupStore(Protocol):
    """Operations of a store that the membership of a group uses.

    Any thread may call them.
    """

    recovers: bool  # whether the store may reply again after `StoreGone`

    def get(self, key: str) -> str | None:
        """Return the value of a key, or None."""

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return the values of keys, read in this order, with None for a missing key."""

    def set(self, key: str, value: str) -> None:
        """Write the value of a key."""

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which begins at 0, and return the sum."""

    def compare_set(self, key: str, expected: str | None, desired: str, lifetime: float = 0) -> str | None:
        """Write the value of a key if it has the expected value (None: no value).

        Args:
            key: The key.
            expected: The expected value.
            desired: The new value.
            lifetime: If more than 0, the store may delete the key after this time in seconds without another write.

        Returns:
            The value afterwards.
        """

    def append(self, epoch: int, entry: str) -> str:
        """Write the entry of an epoch unless it has one; return the entry that it has."""

    def read(self, epoch: int, keys: Sequence[str] = ()) -> tuple[list[str], list[str | None]]:
        """Return the entries of the log from an epoch on, and then values of keys."""

    def forget(self, epochs: range) -> None:
        """Delete the entries of some epochs, if the store can."""

    def watch(self, notify: Callable[[], None]) -> Callable[[], None] | None:
        """Call `notify` on a thread of the store when the log has grown.

        Returns:
            A function that ends it; None if the store cannot notify.
        """

    def reconnect(self, timeout: float, is_same: Callable[[Store], bool]) -> bool:
        """Connect to the store again after `StoreGone`.

        Args:
            timeout: Limit of each step in seconds.
            is_same: Returns whether a store is that of the group. Another one may have the address by now.

        Returns:
            False if this store has no way to connect again.

        Raises:
            StoreGone: The store cannot be reached, or is another one.
        """


class C10dStore:
    """Group store on a c10d store, or on a part of one.

    Its host is one process. Without that process, the members continue, and no worker can join.

    After a lost connection, all operations fail until `reconnect` succeeds: a store that connects on its own may find
    that of another group.

    Args:
        store: The c10d store.
    """

    recovers = False

    def __init__(self, store: Store) -> None:
        self._store = store
        self._broken = ""  # how the connection was lost
        self._reconnecting = threading.Lock()

    def _use(self, operation: Callable[[Store], T]) -> T:
        store = self._store
        if self._broken:
            raise StoreGone(self._broken)
        try:
            return operation(store)
        except StoreUnresponsive:  # a silent host has not ended
            raise
        except StoreGone as e:
            if self._store is store:
                self._broken = str(e) or "the connection was lost"
            raise

    def get(self, key: str) -> str | None:
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        return [None if found is None else _text(found) for found in self._use(lambda store: find(store, keys))]

    def set(self, key: str, value: str) -> None:
        self._use(lambda store: store.set(key, value))

    def add(self, key: str, number: int) -> int:
        return int(self._use(lambda store: store.add(key, number)))

    def compare_set(self, key: str, expected: str | None, desired: str, lifetime: float = 0) -> str | None:
        written = _bytes(expected or ""), _bytes(desired)
        found = _text(self._use(lambda store: store.compare_set(key, *written)))
        # For a missing key, the result is the expected value.
        return self.get(key) if found == expected else found

    def append(self, epoch: int, entry: str) -> str:
        return _text(self._use(lambda store: store.compare_set(log_key(epoch), "", entry)))

    def read(self, epoch: int, keys: Sequence[str] = ()) -> tuple[list[str], list[str | None]]:
        entries: list[str] = []
        entry, *values = self.get_all([log_key(epoch), *keys])
        while entry is not None:
            entries.append(entry)
            entry = self.get(log_key(epoch + len(entries)))
        return entries, self.get_all(keys) if entries and keys else values

    def forget(self, epochs: range) -> None:
        try:
            self._use(lambda store: [store.delete_key(log_key(epoch)) for epoch in epochs])
        except StoreGone:
            raise
        except (RuntimeError, AttributeError) as e:  # a store of the program that has no such operation
            logger.debug("old entries of the group's log remain: %s", e)

    def reconnect(self, timeout: float, is_same: Callable[[Store], bool]) -> bool:
        with self._reconnecting:
            if not self._broken:  # another thread has reconnected
                return True
            try:
                again = _connected_again(self._store, timeout)
                if again is None:
                    return False
                if not within(timeout, lambda: is_same(again)):
                    raise StoreGone("the store at its address is not that of the group")
            except StoreGone:
                raise
            except RuntimeError as e:
                raise StoreGone(str(e)) from e
            self._store, self._broken = again, ""
            return True

    def watch(self, notify: Callable[[], None]) -> None:
        return None


def _text(value: bytes) -> str:
    """Return a value as text that `_bytes` turns back, also if it is none."""
    return bytes(value).decode(errors="surrogateescape")


def _bytes(value: str) -> bytes:
    return value.encode(errors="surrogateescape")


def group_store_of(store: Store) -> GroupStore:
    """Return the group store on the store of a rendezvous."""
    whole, prefix = whole_of(store)
    make: Callable[[str], GroupStore] | None = getattr(whole, "make_group_store", None)
    return C10dStore(store) if make is None else make(prefix)


def outlives_groups(store: Store) -> bool:
    """Return whether the keys of a store remain when all processes have ended."""
    return hasattr(whole_of(store)[0], "make_group_store")


def _connected_again(store: Store, timeout: float) -> Store | None:
    """Return a store with a new connection to the host of this one.

    Args:
        store: The store, or a part of one.
        timeout: Limit of each step in seconds.

    Returns:
        None for stores of the program that cannot be cloned.

    Raises:
        RuntimeError: The host cannot be reached.
    """
    if isinstance(store, Part):
        whole = _connected_again(store.whole, timeout)
        return None if whole is None else Part(store.part, whole)
    base: Any = base_of(store)
    if isinstance(store, LocalStore):
        try:
            return store.connect_again(timeout)
        except OSError as e:
            raise StoreGone(f"no store at {store.host}:{store.port}: {e}") from e
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    if clone is None or not isinstance(base, dist.TCPStore):  # type: ignore[attr-defined]
        return None
    # The constructor of torch's store would wait for the host.
    if why := probe(base.host, base.port, timeout):
        raise StoreGone(f"no store at {base.host}:{base.port}: {why}")
    again = within(timeout, clone)
    again.set_timeout(store.timeout)
    return again
