"""Processes that run functions for a measurement, and may be killed or stopped."""

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from telegrad import rpc
from telegrad.rpc import Options

TIMEOUT = 60.0  # s, on a busy machine

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["bench.reliability.actors"])


class Actor:
    """Process that runs one function at a time."""

    def __init__(self) -> None:
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._connection.send((function, args))

    def result(self) -> Any:
        """Return the result of the function that was begun.

        Raises:
            RuntimeError: It has failed, or takes too long.
        """
        if not self._connection.poll(TIMEOUT):
            raise RuntimeError("a step of a measurement takes too long")
        succeeded, value = self._connection.recv()
        if not succeeded:
            raise RuntimeError(value)
        return value

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(function, *args)
        return self.result()

    def send_signal(self, number: int) -> float:
        """Send a signal; return the time before."""
        assert self.process.pid is not None
        at = time.monotonic()
        os.kill(self.process.pid, number)
        return at

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()


def _serve(connection: Connection) -> None:
    logging.getLogger("telegrad").setLevel(logging.ERROR)  # losses and unauthenticated connections are what is measured
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            result: tuple[bool, Any] = True, function(*args)
        except Exception as e:
            result = False, f"{type(e).__name__}: {e}"
        connection.send(result)


class Group:
    """A dynamic group, with its store in this process."""

    def __init__(self, **options: Any) -> None:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._options = options
        self._actors: list[Actor] = []

    def start(self) -> Actor:
        """Start a process that does not join yet."""
        self._actors.append(Actor())
        return self._actors[-1]

    def join(self, name: str, actor: Actor | None = None) -> tuple[Actor, float]:
        """Let a process join; return it and the duration of the join in seconds."""
        actor = actor or self.start()
        where = f"tcp://127.0.0.1:{self._store.port}"
        return actor, actor.do(_join, name, {"init_method": where, **self._options})

    def close(self) -> None:
        for actor in self._actors:
            actor.end()


def _join(name: str, options: dict[str, Any]) -> float:
    begun = time.monotonic()
    rpc.init_rpc(name, rpc_backend_options=Options(**options))
    return time.monotonic() - begun


@contextmanager
def group(**options: Any) -> Iterator[Group]:
    """Yield a group whose processes end with the block."""
    made = Group(**options)
    try:
        yield made
    finally:
        made.close()
