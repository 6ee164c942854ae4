"""The faults of the soak, in an order that its seed gives."""

import random
import threading
import time
from collections.abc import Callable

from bench.soak.group import Group
from bench.soak.ledger import GONE, NOT_SENT_AGAIN, Fault

HEARTBEAT = 2.0  # s
LIMIT = 3 * HEARTBEAT  # a member that is silent for longer is lost
SHORT = (0.2, 1.5)  # s that a member is stopped, or the network held, without any loss
LONG = LIMIT + 2.0  # s that a member is stopped until it is lost

PROCESS_FAULTS = {"kill": 5, "kill, new name": 2, "leave": 3, "short stop": 6, "long stop": 1}
NETWORK_FAULTS = {"cut": 3, "reset": 3, "network held": 2}


class Faults:
    """Two threads: one for processes, one for the network."""

    def __init__(self, seed: int, group: Group, staying: tuple[str, ...], changing: tuple[str, ...]) -> None:
        self._seed, self._group, self._staying = seed, group, staying
        self._changing = list(changing)
        self._stopping = threading.Event()
        self._errors: list[BaseException] = []
        self._named = 0
        self._threads = [
            threading.Thread(target=self._run, args=(PROCESS_FAULTS, self._process_fault)),
            threading.Thread(target=self._run, args=(NETWORK_FAULTS, self._network_fault)),
        ]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let the present faults end.

        Raises:
            BaseException: A member did not join or leave as it should.
        """
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    @property
    def failed(self) -> bool:
        return bool(self._errors)

    def _run(self, kinds: dict[str, int], inject: Callable[[str, random.Random], None]) -> None:
        chooser = random.Random(f"{self._seed} {sorted(kinds)}")
        try:
            while not self._stopping.wait(chooser.uniform(0.5, 3.0)):
                inject(chooser.choices(list(kinds), list(kinds.values()))[0], chooser)
        except BaseException as e:
            self._errors.append(e)

    def _note(self, kind: str, *members: str) -> Fault:
        fault = Fault(kind, members, time.monotonic())
        with self._group.lock:
            self._group.ledger.faults.append(fault)
        return fault

    def _process_fault(self, kind: str, chooser: random.Random) -> None:
        if kind == "short stop":
            victim = chooser.choice((*self._staying, *self._changing))
            self._note(kind)  # no operation may fail
            self._group.stop_for(victim, chooser.uniform(*SHORT), self._stopping.wait)
            return
        number = chooser.randrange(len(self._changing))
        victim = self._changing[number]
        fault = self._note(kind, victim)
        if kind in ("leave", "long stop"):
            fault.allows = (*GONE, "NotInitialized")  # its own operations: it has left
        if kind == "leave":
            self._group.leave(victim)
        elif kind == "long stop":
            self._group.stop_for(victim, LONG, time.sleep)
            time.sleep(1.0)  # it continues, and finds that the group has lost it
            self._group.kill(victim)
        else:
            self._group.kill(victim)
        if kind == "kill, new name":
            fault.noticed_after = LIMIT  # its successor does not announce its loss
            self._named += 1
            self._changing[number] = f"n{self._named}"
        self._group.join(self._changing[number])
        fault.ended = time.monotonic()

    def _network_fault(self, kind: str, chooser: random.Random) -> None:
        if kind == "network held":
            self._note(kind)
            self._group.proxy.hold(chooser.uniform(*SHORT))
            return
        begun = time.monotonic()
        member = self._group.proxy.cut(chooser, reset=kind == "reset")
        if member is not None:
            fault = self._note(kind, member)
            fault.begun, fault.ended, fault.says = begun, time.monotonic(), NOT_SENT_AGAIN
