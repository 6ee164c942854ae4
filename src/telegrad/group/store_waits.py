"""Store operations with timeouts, and waits for keys with log lines."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist

from telegrad.waits import Wait, wait_for

__all__ = [
    "DYNAMIC",
    "BoundedStore",
    "Operation",
    "Part",
    "Store",
    "StoreGone",
    "StoreUnresponsive",
    "base_of",
    "find",
    "place_of",
    "read_when_written",
    "whole_of",
    "within",
]

DYNAMIC = "rpc_dynamic"
"""Name of the part of a store that its dynamic group uses."""

StoreGone: type[RuntimeError] = dist.DistNetworkError
"""Error of a store operation after the host is gone."""

_NO_VALUE = b"\0no value"  # returned for a missing key, as the expected value
_MIN_PAUSE, _MAX_PAUSE = 0.0005, 0.1  # s between two polls of a store

# The wait of these stores blocks signals, and torch logs each wait at a TCPStore that ends.
_POLLED: tuple[type, ...] = (dist.TCPStore, dist.FileStore)  # type: ignore[attr-defined]

T = TypeVar("T")


class Store(Protocol):
    """Operations of a c10d store that a group uses."""

    @property
    def timeout(self) -> timedelta: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...
    def set(self, key: str, value: str | bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, number: int, /) -> int: ...
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def has_extended_api(self) -> bool: ...


class Part(dist.PrefixStore):  # type: ignore[name-defined,misc]
    """Part of a store, which keeps the whole store alive.

    The whole may be implemented in Python, and torch's class only keeps its C++ side.
    """

    def __init__(self, prefix: str, whole: Store) -> None:
        super().__init__(prefix, whole)
        self.part: str = prefix
        self.whole: Store = whole


class StoreUnresponsive(dist.DistNetworkError):
    """The store's host, or the resolver, did not reply in time."""


class Operation(Generic[T]):
    """Operation, such as one of a store, on a thread of its own.

    Args:
        run: The operation.
    """

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        self._value: T
        self._failure: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._complete, name="telegrad-store-use", daemon=True).start()

    def _complete(self) -> None:
        try:
            self._value = self._run()
        except BaseException as e:
            self._failure = e
        self._done.set()

    def result(self, seconds: float) -> T:
        """Wait for the operation, and return what it returned.

        Args:
            seconds: Limit in seconds.

        Raises:
            StoreUnresponsive: The limit has passed; the operation continues.
        """
        if not wait_for(self._done, seconds):
            raise StoreUnresponsive(f"the host of the group's store has not replied within {seconds:.3g} s")
        if self._failure is not None:
            raise self._failure
        return self._value


def within(seconds: float, operation: Callable[[], T]) -> T:
    """Run an operation, such as one of a store, with a timeout.

    Args:
        seconds: Limit in seconds; 0 for none.
        operation: The operation.

    Raises:
        StoreUnresponsive: The limit has passed; the operation continues on a thread of its own.
    """
    return Operation(operation).result(seconds) if seconds else operation()


class BoundedStore:
    """Store with a timeout for all operations.

    Args:
        store: The store.
        left: Returns the limit of the next operation in seconds; 0 for none.
    """

    def __init__(self, store: object, left: Callable[[], float]) -> None:
        self._store = store
        self._left = left

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name in ("underlying_store", "wait") or not callable(found):  # these have a limit of their own
            return found
        return lambda *args: within(self._left(), lambda: found(*args))


def base_of(store: object) -> object:
    """Return the store of which this store is a part."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def whole_of(store: Store) -> tuple[Store, str]:
    """Return the store of which this store is a part, and the prefix of the part."""
    prefix = ""
    while isinstance(store, Part):
        prefix = f"{store.part}/{prefix}"
        store = store.whole
    return store, prefix


def find(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """Return the values of keys, read in this order, without a wait for missing ones.

    Returns:
        None for a missing key.
    """
    whole, prefix = whole_of(store)
    find_now: Callable[[Sequence[str]], list[bytes | None]] | None = getattr(whole, "find_now", None)
    return [_find(store, key) for key in keys] if find_now is None else find_now([prefix + key for key in keys])


def _find(store: Store, key: str) -> bytes | None:
    # One request, and no wait for a missing key: a comparison that fails returns the value that is there.
    found = bytes(store.compare_set(key, _NO_VALUE, _NO_VALUE))
    return None if found == _NO_VALUE else found


def place_of(store: object) -> str:
    """Return a store's address for messages; "" if it has none."""
    base = base_of(store)
    host = getattr(base, "host", None)
    return f"{host}:{getattr(base, 'port', 0)}" if host else str(getattr(base, "path", ""))


def read_when_written(
    store: Store, keys: list[str], wait: Wait, for_what: Callable[[], tuple[str, str]]
) -> list[bytes] | None:
    """Return the values of keys once a store has all of them; None on timeout.

    Args:
        store: The store.
        keys: The keys.
        wait: Limit and log lines of the wait.
        for_what: As for `Wait.step`.

    Raises:
        StoreGone: The store's host is gone.
    """
    read = _poll if isinstance(base_of(store), _POLLED) else _await
    while (found := read(store, keys, wait.pause())) is None:
        if not wait.left:
            return None
        wait.step(for_what)
    return found


def _await(store: Store, keys: list[str], seconds: float) -> list[bytes] | None:
    begun = time.monotonic()
    whole, prefix = whole_of(store)
    read_within: Callable[[list[str], timedelta], list[bytes]] | None = getattr(whole, "read_within", None)
    try:
        if read_within is not None:
            return read_within([prefix + key for key in keys], timedelta(seconds=seconds))
        store.wait(keys, timedelta(seconds=seconds))
    except StoreGone:
        raise
    except RuntimeError:
        if time.monotonic() - begun < seconds / 2:  # the store failed before the timeout
            raise
        return None
    return _read(store, keys)


def _poll(store: Store, keys: list[str], seconds: float) -> list[bytes] | None:
    begun = time.monotonic()
    while not store.check(keys):
        passed = time.monotonic() - begun
        if passed >= seconds:
            return None
        time.sleep(min(max(passed / 10, _MIN_PAUSE), _MAX_PAUSE, seconds - passed))
    return _read(store, keys)


def _read(store: Store, keys: list[str]) -> list[bytes]:
    return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
