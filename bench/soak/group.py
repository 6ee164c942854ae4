"""The group of the soak, seen from the program that watches it."""

import multiprocessing
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from bench.soak.ledger import Failure, Ledger
from bench.soak.member import Assignment, run
from bench.soak.proxy import Proxy
from bench.soak.resources import InUse

JOIN_LIMIT = 60.0  # s, on a busy machine
HUNG_AFTER = 60.0  # s; an operation's calls have timeouts, its backward passes and steps have none

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["bench.soak.member"])


class Handle:
    """Process of the group."""

    def __init__(self, assignment: Assignment, proxy: Proxy, ledger: Ledger, lock: threading.Lock) -> None:
        self.name = assignment.name
        self._ledger, self._lock, self._proxy = ledger, lock, proxy
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=run, args=(theirs, assignment), daemon=True)
        self.process.start()
        theirs.close()
        self._answers: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._hung: set[tuple[Any, ...]] = set()
        self.in_use = InUse(0, 0)  # as it last reported
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def answer(self, wanted: str, limit: float) -> tuple[Any, ...]:
        """Wait for an answer of the process.

        Raises:
            RuntimeError: It has ended, or takes longer than `limit` seconds.
        """
        try:
            found = self._answers.get(timeout=limit)
        except queue.Empty:
            raise RuntimeError(f"{self.name} has not {wanted} within {limit:.0f} s") from None
        if found[0] != wanted:
            raise RuntimeError(f"{self.name} has not {wanted}: {found}")
        return found[1:]

    def ask(self, order: str, wanted: str, limit: float) -> tuple[Any, ...]:
        self._connection.send(order)
        return self.answer(wanted, limit)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                what, *content = self._connection.recv()
                if what == "expose":
                    self._connection.send(self._proxy.expose(self.name, content[0]))
                elif what == "report":
                    *counts, self.in_use = content
                    self._note(*counts)
                else:
                    self._answers.put((what, *content))
        except (EOFError, OSError):
            self._answers.put(("ended",))

    def _note(self, done: dict[str, int], failed: list[Any], wrong: list[str], running: list[Any]) -> None:
        now = time.monotonic()
        with self._lock:
            self._ledger.add(done, failed, wrong)
            for kind, members, begun in running:
                if now - begun > HUNG_AFTER and (kind, begun) not in self._hung:
                    self._hung.add((kind, begun))
                    self._ledger.failures.append(Failure(kind, members, begun, now, "RpcTimeout", "it still runs"))


class Group:
    """Members that stay, and members that come and go."""

    def __init__(self, seed: int, where: str, options: dict[str, Any], ledger: Ledger, threads: int) -> None:
        self._random = random.Random(f"{seed} group")
        self._seed, self._where, self._options, self._threads = seed, where, options, threads
        self.ledger, self.lock = ledger, threading.Lock()
        self.proxy = Proxy()
        self.members: dict[str, Handle] = {}
        self.joins: list[float] = []
        self._started = 0

    def join(self, name: str, transports: tuple[str, ...] | None = None) -> Handle:
        """Start a process and wait until it is a member."""
        self._started += 1
        transports = transports or self._random.choice((("shm", "unix", "tcp"), ("shm", "unix", "tcp"), ("tcp",)))
        options = {**self._options, "init_method": self._where, "transports": transports}
        assignment = Assignment(name, self._seed * 1000 + self._started, self._threads, options)
        handle = Handle(assignment, self.proxy, self.ledger, self.lock)
        self.members[name] = handle
        self.joins.append(handle.answer("joined", JOIN_LIMIT)[0])
        return handle

    def leave(self, name: str) -> None:
        handle = self.members.pop(name)
        handle.ask("stop", "stopped", JOIN_LIMIT)
        handle.ask("leave", "left", JOIN_LIMIT)
        handle.kill()

    def kill(self, name: str) -> None:
        self.members.pop(name).kill()

    def stop_for(self, name: str, seconds: float, wait: Callable[[float], Any]) -> None:
        """Stop a process and let it continue."""
        self.members[name].signal(signal.SIGSTOP)
        wait(seconds)
        self.members[name].signal(signal.SIGCONT)

    def end(self) -> dict[str, str]:
        """Stop all work; return what members have left behind, and let them leave."""
        for handle in self.members.values():
            handle.ask("stop", "stopped", 2 * HUNG_AFTER)
        found = {name: handle.ask("check", "checked", JOIN_LIMIT)[0] for name, handle in self.members.items()}
        return {name: text for name, text in found.items() if text}

    def close(self) -> None:
        for handle in self.members.values():
            handle.kill()
        self.proxy.close()
