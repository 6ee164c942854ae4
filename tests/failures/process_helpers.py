"""Workers in separate processes that run steps for a test, and may be killed."""

import faulthandler
import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from free_ports import free_port
from stopped_processes import is_stopped, resume, stop

from telegrad import rpc
from telegrad.rpc import Options

TIMEOUT = 30.0  # s; steps are short, but the machine may be busy

_context = multiprocessing.get_context("forkserver")

state: dict[str, Any] = {}
"""What steps leave for later ones, in each actor's process."""


class Step:
    """Function that an actor runs."""

    def __init__(self, actor: "Actor") -> None:
        self._actor = actor
        self._over = threading.Event()
        self._result: tuple[bool, Any] = (False, "")

    def finish(self, succeeded: bool, value: Any) -> None:
        self._result = succeeded, value
        self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether the function has ended."""
        return self._over.is_set()

    @property
    def succeeded(self) -> bool:
        """Whether the function has returned."""
        return self._result[0]

    def result(self, timeout: float = TIMEOUT) -> Any:
        """Return the result of the step.

        Raises:
            AssertionError: It raised (the text is its traceback), its process died, or it takes too long.
        """
        assert self._over.wait(timeout), f"the step takes too long; {self._actor.name} is at\n{self._actor.stacks()}"
        succeeded, value = self._result
        assert succeeded, value
        return value


class Actor:
    """Process that runs steps.

    Args:
        setup: Called in the process before it has other threads.
    """

    def __init__(self, rank: int, folder: Path, setup: Callable[[], None] | None = None) -> None:
        self.rank = rank
        self.name = f"w{rank}"
        self._log = folder / f"{rank}.err"
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_act, args=(theirs, str(self._log), setup), daemon=False)
        self.process.start()
        theirs.close()
        self._numbers = itertools.count()
        self._steps: dict[int, Step] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self, function: Callable[..., Any], *args: Any) -> Step:
        """Start a function of a module in a new thread of the actor."""
        number, step = next(self._numbers), Step(self)
        self._steps[number] = step
        self._connection.send((number, function, args))
        return step

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the actor and return its result."""
        return self.begin(function, *args).result()

    def end(self, with_signal: int = signal.SIGKILL) -> None:
        """Send a signal and wait until the process has ended."""
        assert self.process.pid is not None
        os.kill(self.process.pid, with_signal)
        self.process.join(TIMEOUT)
        assert self.process.exitcode == -with_signal

    def stop(self) -> float:
        """Stop the process; return the time of the signal."""
        return stop(self.process.pid)

    def is_stopped(self) -> bool:
        """Whether each thread of the process stands still."""
        return is_stopped(self.process.pid)

    def resume(self) -> float:
        """Let the stopped process go on; return the time."""
        return resume(self.process.pid)

    def leave(self) -> int | None:
        """Let the process end like a finished program; return its exit code."""
        self._connection.send(None)
        self.process.join(TIMEOUT)
        return self.process.exitcode

    def stderr(self) -> str:
        """Return the output so far."""
        return self._log.read_text()

    def stacks(self) -> str:
        """Return the stacks of its threads and of its children's."""
        before = len(self.stderr())
        for pid in (self.process.pid, *_children_of(self.process.pid)):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)  # only when a test has failed
        return self.stderr()[before:]

    def clean_up(self) -> None:
        self.process.kill()
        self.process.join()
        self._reader.join()
        self._connection.close()
        self.process.close()

    def _read(self) -> None:
        while True:
            try:
                number, succeeded, value = self._connection.recv()
            except (EOFError, ConnectionResetError):
                for step in self._steps.values():
                    step.finish(False, f"process {self.rank} has ended; it said: {self.stderr()}")
                return
            self._steps.pop(number).finish(succeeded, value)


def _children_of(pid: int | None) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _act(connection: Connection, log: str, setup: Callable[[], None] | None) -> None:
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(fd, 2)
    os.close(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if setup is not None:
        setup()

    def run(number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result = True, function(*args)
        except BaseException:
            result = False, traceback.format_exc()
        connection.send((number, *result))

    while (order := connection.recv()) is not None:
        threading.Thread(target=run, args=order, daemon=True).start()


@contextmanager
def actors(
    count: int, folder: Path, *, method: str = "file", names: str = "w{}", **options: Any
) -> Iterator[list[Actor]]:
    """Start processes that join one group.

    Args:
        method: "file"; "tcp", in which the first has the store; or "none", in which they do not join.
        names: Format of worker names, with the rank in braces.
        options: Options of all workers.
    """
    group: list[Actor] = []
    try:
        for rank in range(count):
            group.append(Actor(rank, folder))
            group[rank].name = names.format(rank)
        if method == "none":
            yield group
            return
        where = f"file://{folder}/store" if method == "file" else f"tcp://127.0.0.1:{free_port()}"
        joining = [actor.begin(join, actor.name, actor.rank, count, where, options) for actor in group]
        for step in joining:
            step.result()
        yield group
    finally:
        for actor in group:
            actor.clean_up()


# ---- steps


def join(name: str, rank: int, count: int | None, where: str, options: dict[str, Any]) -> None:
    rpc.init_rpc(name, rank=rank, world_size=count, rpc_backend_options=Options(init_method=where, **options))


def call(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args, timeout=TIMEOUT)


def call_many(to: str, count: int) -> int:
    """Make `count` calls and return the number of correct results."""
    return sum(rpc.rpc_sync(to, abs, (-i,), timeout=TIMEOUT) == i for i in range(count))


def begin_calls(to: str, function: Callable[..., Any], count: int) -> None:
    """Start calls that do not return, and wait until they have arrived."""
    state["calls"] = [rpc.rpc_async(to, function, timeout=0) for _ in range(count)]
    rpc.rpc_sync(to, abs, (-1,), timeout=TIMEOUT)  # on the same connection, so behind them


def failures_of_calls() -> tuple[float, list[tuple[str, str]]]:
    """Return when the last of them had failed, and their errors."""
    failures = []
    for future in state["calls"]:
        try:
            future.wait()
        except Exception as e:
            failures.append((type(e).__name__, str(e)))
    return time.monotonic(), failures


def failure(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """Return the error of a function."""
    try:
        value = function(*args)
    except Exception as e:
        return type(e).__name__, str(e)
    return "", repr(value)


def shut_down(graceful: bool = True, timeout: float = TIMEOUT) -> float:
    """Shut down and return the duration."""
    start = time.monotonic()
    rpc.shutdown(graceful, timeout)
    return time.monotonic() - start


def hang() -> None:
    """Block on the worker that will be killed."""
    threading.Event().wait()


def shut_all_down(group: list[Actor]) -> list[float]:
    steps = [actor.begin(shut_down) for actor in group]
    return [step.result() for step in steps]
