"""When a step of an optimizer becomes visible: between the runs of handlers, not in the middle of one.

One `StepGate` per worker. Handlers that run in an autograd context pass it as readers, any number at once; a step holds
it alone, for the moment in which the parameters change. The two may wait for each other, so it is made such that
nothing stands still for ever, whatever user code does:

- Whoever holds the gate alone runs no user code, so that it ends by itself.
- A step waits for the runs of *other* contexts only, and not for those of its own thread: a handler that steps its own
  context, however deep in calls, does not wait for itself.
- While a step waits, handlers that arrive wait for it (or a busy server would never let a step through), but a handler
  is let in if its context has one inside already, which may be waiting for this very one; and one step is all that any
  handler waits for.
- A step gives up waiting once all handlers it waits for have stood still for `STILL` seconds: what they wait for may be
  the step. How much processor time their threads have used tells a handler that works from one that waits. It also
  gives up after `MOST` seconds in all. Then it goes on while they are inside; `Turn.alone` says so.

A fair lock with the order of arrival would be the usual choice where none of this can happen; here handlers call each
other across workers, and the lock cannot see how.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["StepGate", "Turn"]

logger: logging.Logger = logging.getLogger("telegrad")

STILL = 1.0  # s that all handlers a step waits for may stand still before it goes on without them
MOST = 20.0  # s that it waits in any case
_LOOK = 0.05  # s between two looks at them
_WORKING = 0.1  # share of a processor from which on a thread counts as working

_clock_of: Callable[[int], int] | None = getattr(time, "pthread_getcpuclockid", None)


class Turn(NamedTuple):
    """How a step holds the gate."""

    alone: bool  # no handler of another context is inside
    unwatched: bool  # nor is the body of one open on this worker: nobody reads parameters but through the gate


class StepGate:
    """Lets handlers and steps pass in turns. Every method may be called from any thread.

    Args:
        still: seconds without any progress after which a step goes on without the handlers it waits for.
        most: seconds after which it does so in any case.
    """

    def __init__(self, still: float = STILL, most: float = MOST) -> None:
        self.copies_shared = False  # parameters in shared memory are stepped here, see telegrad.autograd.versions
        self._still = still
        self._most = most
        self._changed = threading.Condition(threading.Lock())
        self._runs: dict[int, tuple[int, int]] = {}  # by number: context and thread of each handler inside
        self._bodies: Counter[int] = Counter()  # contexts whose bodies are open here
        self._waiting: Counter[int] = Counter()  # contexts whose steps wait
        self._stepping = False
        self._rounds = 0  # steps so far
        self._queued = 0  # handlers that wait
        self._due = 0  # those of them that have waited for a step, which no further one may overtake
        self._number = 0

    # ---- handlers

    def enter(self, context: int) -> int:
        """A handler of a context begins to run in this thread; waits for a step that is due. Returns a number for
        `leave`."""
        with self._changed:
            if self._stepping or self._waiting:
                rounds = self._rounds
                self._queued += 1
                try:
                    self._changed.wait_for(lambda: not self._stepping and self._may_enter(context, rounds))
                finally:  # a signal handler may raise there
                    self._queued -= 1
                    if rounds != self._rounds:
                        self._due -= 1
                        self._changed.notify_all()
            self._number = number = self._number + 1
            self._runs[number] = context, threading.get_ident()
        return number

    def leave(self, number: int) -> None:
        """It has run."""
        with self._changed:
            del self._runs[number]
            if self._waiting:
                self._changed.notify_all()

    def _may_enter(self, context: int, rounds: int) -> bool:
        if not self._waiting or self._rounds != rounds or context in self._waiting:
            return True
        return any(inside == context for inside, _ in self._runs.values())

    # ---- bodies of contexts, which may last long and hold nothing up

    def open_body(self, context: int) -> None:
        """The body of a context begins on this worker; waits for a step that is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._stepping)
            self._bodies[context] += 1

    def close_body(self, context: int) -> None:
        """It has ended."""
        with self._changed:
            self._bodies[context] -= 1
            if not self._bodies[context]:
                del self._bodies[context]

    # ---- steps

    @contextmanager
    def step(self, context: int) -> Iterator[Turn]:
        """Holds the gate for a step of a context. No user code may run within."""
        mine = False
        try:
            with self._changed:
                self._waiting[context] += 1
                try:
                    alone = self._wait_for_others(context)
                finally:
                    self._waiting[context] -= 1
                    if not self._waiting[context]:
                        del self._waiting[context]
                    self._changed.notify_all()
                turn = Turn(alone, alone and not any(body != context for body in self._bodies))
                mine = self._stepping = True
            yield turn
        finally:
            if mine:
                with self._changed:
                    self._stepping = False
                    self._rounds += 1
                    self._due = self._queued
                    self._changed.notify_all()

    def _others(self, context: int) -> list[int]:
        """Threads of the handlers that a step has to wait for."""
        me = threading.get_ident()
        return [thread for inside, thread in self._runs.values() if inside != context and thread != me]

    def _wait_for_others(self, context: int) -> bool:
        """False: it has given up."""
        patience = _Patience(self._still, self._most)
        while True:
            if not self._stepping and not self._due:
                others = self._others(context)
                if not others:
                    return True
                if patience.is_over(others):
                    logger.warning(
                        "a step of autograd context %d goes on while %d handlers of other contexts run: they stand"
                        " still, and may be waiting for it. They see some parameters before the step and some after"
                        " it; gradients stay those of what each operation used.",
                        context,
                        len(others),
                    )
                    return False
            self._changed.wait(_LOOK)


class _Patience:
    """Whether handlers still make progress, seen from outside."""

    def __init__(self, still: float, most: float) -> None:
        self._still = still
        self._start = self._looked = self._progress = time.monotonic()
        self._end = self._start + most
        self._used: dict[int, float] = {}  # processor seconds by thread

    def is_over(self, threads: list[int]) -> bool:
        """Called with the gate's lock, so the threads are in their handlers and exist."""
        now = time.monotonic()
        used = {thread: _processor_time(thread) for thread in threads}
        enough = _WORKING * (now - self._looked)
        if used.keys() != self._used.keys() or any(used[t] - self._used[t] > enough for t in used):
            self._progress = now
        self._used, self._looked = used, now
        return now - self._progress > self._still or now > self._end


def _processor_time(thread: int) -> float:
    """Seconds that it has run; where the system does not tell, the time of day, as if it had worked all along."""
    if _clock_of is None:
        return time.monotonic()
    return time.clock_gettime(_clock_of(thread))
