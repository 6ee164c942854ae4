"""Groups of processes, for tests of what one process cannot show: death, forks, imports, ports."""

import faulthandler
import multiprocessing
import os
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

__all__ = ["ProcessError", "Processes", "processes"]

_STACKS = signal.SIGUSR1  # makes a child write its stacks
_STACKS_END = 0.5  # s of silence after which they are taken to be complete
_GOODBYE = 10.0  # s that a child may take to end after its result is here


class ProcessError(AssertionError):
    """A process failed, died, or did not end in time. The text has each one's traceback or stacks.

    Attributes:
        failures: text by rank.
    """

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- process {rank}: {text}" for rank, text in sorted(failures.items())))


def processes(
    n: int,
    main: Callable[..., Any],
    *args: Any,
    method: str = "spawn",
    timeout: float = 60.0,
) -> list[Any]:
    """Runs ``main(rank, n, init_method, *args)`` in n processes.

    Args:
        n: how many.
        main: a function that can be pickled (unless forked). ``init_method`` is one that nobody else uses.
        method: how they are started: "spawn", "fork" or "forkserver".
        timeout: seconds, for all of them together.

    Returns:
        What each returned, in the order of ranks.

    Raises:
        ProcessError: some failed; all have been ended. One that hung is shown with the stacks of all its threads.
    """
    with Processes(n, main, *args, method=method) as group:
        return group.results(timeout)


class Processes:
    """Running processes, for tests that kill some of them; see `processes` for the arguments.

    A context manager: at the end all are killed, by their ids.
    """

    def __init__(self, n: int, main: Callable[..., Any], *args: Any, method: str = "spawn") -> None:
        context = multiprocessing.get_context(method)
        self._folder = tempfile.mkdtemp(prefix="telegrad-test-")
        init_method = f"file://{self._folder}/store"
        self._children: list[BaseProcess] = []
        self._results: list[Connection] = []
        self._stacks: list[Connection] = []
        for rank in range(n):
            result, send_result = context.Pipe(duplex=False)
            stacks, send_stacks = context.Pipe(duplex=False)
            child = context.Process(  # type: ignore[attr-defined]
                target=_child, args=(send_result, send_stacks, main, (rank, n, init_method, *args)), daemon=False
            )
            child.start()
            send_result.close()  # ours: the child's is the only one left, so its death is seen
            send_stacks.close()
            self._children.append(child)
            self._results.append(result)
            self._stacks.append(stacks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        for rank in range(len(self._children)):
            self.kill(rank)
        for connection in (*self._results, *self._stacks):
            connection.close()
        for child in self._children:
            child.close()
        self._children = []
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        """Their process ids, by rank."""
        return [child.pid or 0 for child in self._children]

    def kill(self, rank: int) -> None:
        """Ends one with SIGKILL, and waits until it is gone."""
        self._children[rank].kill()
        self._children[rank].join()

    def results(self, timeout: float = 60.0, ranks: Sequence[int] | None = None) -> list[Any]:
        """Waits for what they return.

        Args:
            timeout: seconds, for all of them together.
            ranks: of whom; all by default.

        Raises:
            ProcessError: as `processes`.
        """
        wanted = range(len(self._children)) if ranks is None else ranks
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        open_ranks = {self._results[rank]: rank for rank in wanted}
        while open_ranks:
            # Those who wait for one that failed would fill the report with their own time-outs: some time is enough.
            left = min(deadline - time.monotonic(), 5.0 if failures else timeout)
            ready = wait(list(open_ranks), max(0.0, left))
            if not ready:
                failures |= {rank: f"hung, with\n{self._stacks_of(rank)}" for rank in open_ranks.values()}
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = open_ranks.pop(connection)
                try:
                    worked, value = connection.recv()
                except EOFError:
                    self._children[rank].join(_GOODBYE)
                    worked, value = (
                        False,
                        f"died with exit code {self._children[rank].exitcode}",
                    )
                (results if worked else failures)[rank] = value
        for rank in results:
            self._children[rank].join(_GOODBYE)
            if self._children[rank].exitcode is None:
                failures[rank] = f"did not end after its function returned, with\n{self._stacks_of(rank)}"
        if failures:
            raise ProcessError(failures)
        return [results[rank] for rank in wanted]

    def _stacks_of(self, rank: int) -> str:
        """Where the threads of a process are; empty if it cannot say."""
        pid = self._children[rank].pid
        if pid is None or not self._children[rank].is_alive():
            return ""
        os.kill(pid, _STACKS)
        fd = self._stacks[rank].fileno()
        text = b""
        while select.select([fd], [], [], _STACKS_END)[0]:
            part = os.read(fd, 1 << 16)
            if not part:
                break
            text += part
        return text.decode(errors="replace")


def _child(send_result: Connection, send_stacks: Connection, main: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # A descriptor that stays open to the very end, when Python's own threads may be what hangs.
    faulthandler.register(_STACKS, file=os.dup(send_stacks.fileno()), all_threads=True)
    try:
        outcome: tuple[bool, Any] = (True, main(*args))
    except BaseException as e:
        outcome = (False, "".join(traceback.format_exception(e)))
    try:
        send_result.send(outcome)
    except Exception as e:  # a result that cannot be pickled
        send_result.send((False, "".join(traceback.format_exception(e))))
    send_result.close()
