"""When a call is made again after a loss, and after which pause."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from telegrad.errors import RemoteError, TelegradError, WorkerLost

__all__ = ["Retry", "require_retry"]

_MOST_DOUBLINGS = 60  # larger powers of two overflow a float, far beyond any pause


@dataclass(frozen=True, slots=True)
class Retry:
    """Policy for calls that are made again after a loss; pass it as ``retry=``.

    Only for idempotent functions: the callee may have run the function before it was lost. While the callee lives, it
    runs the function once, and a further attempt gets the result of the first (see the guide).

    The pause before attempt n + 1 is ``backoff * 2 ** (n - 1)`` seconds, at most ``max_backoff``. With ``jitter`` it is
    a random time between 0 and that, so that the callers of a restarted worker do not all return at once.

    Args:
        attempts: number of attempts in all, the first included.
        backoff: seconds of the first pause.
        max_backoff: longest pause in seconds.
        jitter: draw the pause at random.
        on: errors after which the call is made again. The errors of Telegrad among them, such as `WorkerLost`, do not
            cover errors of the same type that the function itself raised; other classes do.

    Raises:
        ValueError: a number is too small.
        TypeError: ``on`` has something else than exception classes.

    Example::

        retry = rpc.Retry(attempts=5, backoff=0.05)
        print(rpc.rpc_sync("worker1", max, args=(1, 2), timeout=30, retry=retry))  # 2
    """

    attempts: int = 3
    backoff: float = 0.1
    max_backoff: float = 5.0
    jitter: bool = True
    on: tuple[type[Exception], ...] = (WorkerLost,)

    def __post_init__(self) -> None:
        attempts: Any = self.attempts
        if not isinstance(attempts, int) or attempts < 1:
            raise ValueError(f"attempts of Retry has to be an integer of at least 1, and is {attempts!r}")
        for name in ("backoff", "max_backoff"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of Retry has to be a finite number of seconds, 0 or more, not {value!r}")
        given: Any = self.on
        on = given if isinstance(given, tuple) else (given,)
        for kind in on:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise TypeError(f"on of Retry has to be classes of exceptions, and has {kind!r}")
        object.__setattr__(self, "on", on)

    def covers(self, error: BaseException) -> bool:
        """Return whether the call is made again after an error."""
        if not isinstance(error, RemoteError):
            return isinstance(error, self.on)
        return isinstance(error, tuple(kind for kind in self.on if not _is_own(kind)))

    def pause(self, attempt: int, draw: Callable[[], float] = random.random) -> float:
        """Return the pause after an attempt in seconds.

        Args:
            attempt: Number of the attempt, from 1.
            draw: Returns a random number between 0 and 1.
        """
        longest = min(self.backoff * 2.0 ** min(attempt - 1, _MOST_DOUBLINGS), self.max_backoff)
        return longest * draw() if self.jitter else longest


def require_retry(given: object) -> None:
    """Raise TypeError if an argument is no policy."""
    if not isinstance(given, Retry):
        raise TypeError(f"retry has to be a telegrad.rpc.Retry, such as Retry(attempts=3), not {given!r}")


def _is_own(kind: type[Exception]) -> bool:
    """Return whether a class is for errors that Telegrad raises at the caller.

    RemoteError is none: it covers any error of the function.
    """
    return issubclass(kind, TelegradError) and kind is not RemoteError
