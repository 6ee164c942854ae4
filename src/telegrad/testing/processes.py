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
_LISTENS = b"!"  # what it writes first of all where its stacks go
_STACKS_BEGIN = 5.0  # s until the first of them must be here; it takes milliseconds, but the machine may be busy
_STACKS_END = 0.5  # s of silence after which they are taken to be complete
_GOODBYE = 10.0  # s that a child may take to end after its result is here
_AFTER_FAILURE = 5.0  # s that the others may still take: those who wait for it would fill the report with time-outs


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
        self._context = multiprocessing.get_context(method)
        self._folder = tempfile.mkdtemp(prefix="telegrad-test-")
        init_method = f"file://{self._folder}/store"
        self._children: list[BaseProcess] = []
        self._results: list[Connection] = []
        self._stacks: list[Connection] = []
        self._listening: set[int] = set()
        try:
            for rank in range(n):
                self._start(main, (rank, n, init_method, *args))
        except BaseException:  # `main` cannot be pickled, say
            self.__exit__(None, None, None)
            raise

    def _start(self, main: Callable[..., Any], args: tuple[Any, ...]) -> None:
        result, send_result = self._context.Pipe(duplex=False)
        stacks, send_stacks = self._context.Pipe(duplex=False)
        self._results.append(result)
        self._stacks.append(stacks)
        try:
            child = self._context.Process(  # type: ignore[attr-defined]
                target=_child, args=(send_result, send_stacks, main, args), daemon=False
            )
            child.start()
            self._children.append(child)
        finally:
            send_result.close()  # ours: the child's is the only one left, so its death is seen
            send_stacks.close()

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
            left = min(deadline - time.monotonic(), _AFTER_FAILURE if failures else timeout)
            ready = wait(list(open_ranks), max(0.0, left))
            if not ready:
                failures |= self._stacks_of(list(open_ranks.values()), "hung, with")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = open_ranks.pop(connection)
                worked, value = self._receive(rank)
                (results if worked else failures)[rank] = value
        for rank in results:
            self._children[rank].join(_GOODBYE)
            code = self._children[rank].exitcode
            if code is None:
                failures |= self._stacks_of([rank], "did not end after its function returned, with")
            elif code != 0:
                failures[rank] = f"ended with exit code {code} after its function returned"
        if failures:
            raise ProcessError(failures)
        return [results[rank] for rank in wanted]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        """What a process has to say: (True, its result) or (False, what went wrong)."""
        try:
            outcome: tuple[bool, Any] = self._results[rank].recv()
        except (EOFError, OSError):  # before a word of it, or in the midst of one
            self._children[rank].join(_GOODBYE)
            return False, f"died with exit code {self._children[rank].exitcode}"
        except Exception as e:
            return False, f"returned what cannot be unpickled here: {e!r}"
        return outcome

    def _listens(self, rank: int) -> bool:
        """Has it said that it writes its stacks when it is told to? The signal would end it before."""
        fd = self._stacks[rank].fileno()
        if rank not in self._listening and select.select([fd], [], [], 0.0)[0] and os.read(fd, len(_LISTENS)):
            self._listening.add(rank)
        return rank in self._listening

    def _stacks_of(self, ranks: Sequence[int], what: str) -> dict[int, str]:
        """Where the threads of some processes are, by rank, after `what`."""
        for rank in ranks:  # all at once, so that all together take no longer than one
            pid = self._children[rank].pid
            if pid is not None and self._listens(rank) and self._children[rank].is_alive():
                os.kill(pid, _STACKS)
        begin = time.monotonic() + _STACKS_BEGIN
        texts = {}
        for rank in ranks:
            text = _read_stacks(self._stacks[rank].fileno(), begin) if rank in self._listening else ""
            texts[rank] = f"{what}\n{text or 'no stacks: it is stopped, or has not come to its function'}"
        return texts


def _read_stacks(fd: int, begin: float) -> str:
    """What comes until there is silence; it must have begun by then."""
    text = b""
    while select.select([fd], [], [], _STACKS_END if text else max(0.0, begin - time.monotonic()))[0]:
        part = os.read(fd, 1 << 16)
        if not part:
            break
        text += part
    return text.decode(errors="replace")


def _child(send_result: Connection, send_stacks: Connection, main: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # A descriptor that stays open to the very end, when Python's own threads may be what hangs.
    faulthandler.register(_STACKS, file=os.dup(send_stacks.fileno()), all_threads=True)
    os.write(send_stacks.fileno(), _LISTENS)
    try:
        outcome: tuple[bool, Any] = (True, main(*args))
    except BaseException as e:
        outcome = (False, "".join(traceback.format_exception(e)))
    try:
        send_result.send(outcome)
    except Exception as e:  # a result that cannot be pickled
        send_result.send((False, "".join(traceback.format_exception(e))))
    send_result.close()
