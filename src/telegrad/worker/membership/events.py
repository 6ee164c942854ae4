"""Functions of the program that are called when members join, leave or are lost."""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable

from telegrad.protocols.membership import Event, Joined, Left
from telegrad.types import WorkerInfo

__all__ = ["GroupEvents", "Subscription"]

logger: logging.Logger = logging.getLogger("telegrad")

JOIN, LEAVE, LOSS = "join", "leave", "loss"


class Subscription:
    """Function that is called for events of a group, until `remove`.

    Example::

        subscription = rpc.on_join(lambda info: print(info.name, "joined"))
        subscription.remove()
    """

    def __init__(self, remove: Callable[[], object]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """Stop calling the function. A further call does nothing."""
        self._remove()


class GroupEvents:
    """Calls of the program's functions for the events of a group.

    The calls are in the order of the events, one at a time.

    Args:
        submit: Runs a function on a thread of the worker that may run code of the program.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        self._functions: dict[int, tuple[str, Callable[..., object]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._events: deque[tuple[str, tuple[object, ...]]] = deque()
        self._is_running = False

    def subscribe(self, kind: str, function: Callable[..., object]) -> Subscription:
        """Call a function for each event of a kind: JOIN, LEAVE or LOSS."""
        number = next(self._numbers)
        self._functions[number] = kind, function
        return Subscription(lambda: self._functions.pop(number, None))

    def add(self, event: Event) -> None:
        """Pass an event to the program's functions. Never blocks."""
        info = WorkerInfo(event.member.name, event.member.id)
        if isinstance(event, Joined):
            entry: tuple[str, tuple[object, ...]] = JOIN, (info,)
        elif isinstance(event, Left):
            entry = LEAVE, (info,)
        else:
            entry = LOSS, (info, event.why)
        with self._lock:
            if not self._functions:
                return
            self._events.append(entry)
            if self._is_running:
                return
            self._is_running = True
        self._submit(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._events:
                    self._is_running = False
                    return
                kind, arguments = self._events.popleft()
            for wanted, function in list(self._functions.values()):
                if wanted != kind:
                    continue
                try:
                    function(*arguments)
                except BaseException:  # SystemExit too: it would end neither the process nor this thread of the pool
                    logger.exception("a function for events of the group raised an exception; the others are called")
