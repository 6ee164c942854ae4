"""Uses of a group's store: bounded in time, and waits for its keys that the log announces."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from telegrad.waits import Wait, wait_for

__all__ = ["BoundedStore", "StoreGone", "StoreUnresponsive", "base_of", "place_of", "wait_for_keys", "within"]

StoreGone: type[RuntimeError] = dist.DistNetworkError
"""The error of a store operation whose host has gone."""

_MIN_PAUSE, _MAX_PAUSE = 0.0005, 0.1  # s between two polls of a store whose own wait is not used

# The wait of these stores blocks signals, and torch logs each wait at a TCPStore that ends.
_POLLED: tuple[type, ...] = (dist.TCPStore, dist.FileStore)  # type: ignore[attr-defined]

T = TypeVar("T")


class StoreUnresponsive(dist.DistNetworkError):
    """The store's host, or the resolver, does not answer in time."""


def within(seconds: float, operation: Callable[[], T]) -> T:
    """Run an operation that may not end by itself, such as one of a store.

    Args:
        seconds: how long to wait for it; 0 is no limit.

    Raises:
        StoreUnresponsive: it takes longer. It goes on in a thread of its own.
    """
    if not seconds:
        return operation()
    outcome: list[T] = []
    failure: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            outcome.append(operation())
        except BaseException as e:
            failure.append(e)
        over.set()

    threading.Thread(target=run, name="telegrad-store-use", daemon=True).start()
    if not wait_for(over, seconds):
        raise StoreUnresponsive(f"the host of the group's store has not answered within {seconds:.3g} s")
    if failure:
        raise failure[0]
    return outcome[0]


class BoundedStore:
    """A store whose operations all have to end in time.

    Args:
        store: any.
        left: says how many seconds the next one may take; 0 is no limit.
    """

    def __init__(self, store: Any, left: Callable[[], float]) -> None:
        self._store = store
        self._left = left

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name in ("underlying_store", "wait") or not callable(found):  # a wait has a limit of its own
            return found
        return lambda *args: within(self._left(), lambda: found(*args))


def base_of(store: Any) -> Any:
    """The store of which this one is a part."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def place_of(store: Any) -> str:
    """Where a store is, for people; "" if it does not say."""
    base = base_of(store)
    host = getattr(base, "host", None)
    return f"{host}:{base.port}" if host else str(getattr(base, "path", ""))


def wait_for_keys(store: Any, keys: Sequence[str], wait: Wait, for_what: Callable[[], tuple[str, str]]) -> bool:
    """Wait until a store has all of these keys.

    Args:
        for_what: as for `Wait.step`.

    Returns:
        False if it has not when the time is up.

    Raises:
        StoreGone: the store's host has gone.
    """
    await_them = _poll if isinstance(base_of(store), _POLLED) else _await
    while not await_them(store, keys, wait.pause()):
        if not wait.left:
            return False
        wait.step(for_what)
    return True


def _await(store: Any, keys: Sequence[str], seconds: float) -> bool:
    begun = time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except StoreGone:
        raise
    except RuntimeError:
        if time.monotonic() - begun < seconds / 2:  # not for want of time
            raise
        return False
    return True


def _poll(store: Any, keys: Sequence[str], seconds: float) -> bool:
    begun = time.monotonic()
    while not store.check(keys):
        passed = time.monotonic() - begun
        if passed >= seconds:
            return False
        time.sleep(min(max(passed / 10, _MIN_PAUSE), _MAX_PAUSE, seconds - passed))
    return True
