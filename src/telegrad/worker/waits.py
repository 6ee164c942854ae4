"""Waits for other workers: how long one may take, and what has to be done meanwhile."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["StoreGone", "Wait", "wait_for_keys"]

StoreGone: type[RuntimeError] = dist.DistNetworkError
"""What using a store raises whose host has gone."""


class Wait:
    """One wait for other workers.

    Args:
        who: waits: name and rank.
        timeout: seconds.
        look: called again and again while the wait lasts; what it raises ends the wait.
        every: seconds between two looks.
    """

    def __init__(self, who: str, timeout: float, look: Callable[[], None] | None = None, every: float = 0.5) -> None:
        self.who = who
        self.timeout = timeout
        self._look = look
        self._every = every
        self._until = time.monotonic() + timeout

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._until

    def pause(self) -> float:
        """Seconds until there is something to do besides waiting; more than 0."""
        ends = [self._until - time.monotonic()]
        if self._look is not None:
            ends.append(self._every)
        return max(min(ends), 0.001)

    def step(self) -> None:
        """Does what there is to do between two pauses."""
        if self._look is not None:
            self._look()


def wait_for_keys(store: Any, keys: Sequence[str], wait: Wait) -> bool:
    """Wait until a store has all of these keys.

    Returns:
        False if it has not when the time is up.

    Raises:
        StoreGone: the store's host has gone.
    """
    while True:
        pause = wait.pause()
        begun = time.monotonic()
        try:
            store.wait(keys, timedelta(seconds=pause))
            return True
        except StoreGone:
            raise
        except RuntimeError:
            if time.monotonic() - begun < pause / 2:  # not for want of time
                raise
        if wait.over:
            return False
        wait.step()
