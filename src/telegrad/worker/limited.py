"""What may not end, and cannot be interrupted: uses of a store whose host has stopped, or questions to a resolver."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from telegrad.worker.waits import wait_for

__all__ = ["Limited", "StoreSilent", "within"]

T = TypeVar("T")


class StoreSilent(dist.DistNetworkError):
    """The store's host, or the resolver, does not answer in time."""


def within(seconds: float, operation: Callable[[], T]) -> T:
    """Run an operation that may not end by itself, such as one of a store.

    Args:
        seconds: how long to wait for it; 0 is no limit.

    Raises:
        StoreSilent: it takes longer. It goes on in a thread of its own.
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
        raise StoreSilent(f"the host of the group's store has not answered within {seconds:.3g} s")
    if failure:
        raise failure[0]
    return outcome[0]


class Limited:
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
