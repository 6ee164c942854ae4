"""Groups of processes for tests: death, forks, imports, ports."""

import faulthandler
import gc
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

_STACKS = signal.SIGUSR1  # signal for a child to write its stacks
_LISTENS = b"!"  # first message of a child on the connection for its stacks
_STACKS_BEGIN = 5.0  # s until the first output; it takes milliseconds, unless the machine is busy
_STACKS_END = 0.5  # s without output after which the stacks count as complete
_GOODBYE = 10.0  # s for a child to end after its result has arrived
_AFTER_FAILURE = 5.0  # s for the other processes: those that wait for the failed one would only report timeouts


class ProcessError(AssertionError):
    """Process that failed, died, or did not end in time.

    The text has the traceback or the stacks of each process.

    Attributes:
        failures: text by rank.

    Example::

        from telegrad.testing import ProcessError, processes

        def main(rank, n, init_method):
            raise ValueError(f"rank {rank} failed")

        if __name__ == "__main__":
            try:
                processes(2, main)
            except ProcessError as error:
                print(sorted(error.failures))  # [0, 1]
    """

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- process {rank}: {text}" for rank, text in sorted(failures.items())))


def processes(
    n: int,
    main: Callable[..., object],
    *args: object,
    method: str = "spawn",
    timeout: float = 60.0,
) -> list[Any]:
    """Run ``main(rank, n, init_method, *args)`` in n processes.

    Args:
        n: number of processes.
        main: a function that can be pickled (unless forked). Its ``init_method`` is unique.
        method: start method: "spawn", "fork" or "forkserver".
        timeout: limit in seconds for all of them together.

    Returns:
        The return values, in the order of ranks.

    Raises:
        ProcessError: some processes failed; all have been ended. The text has the stacks of hung processes.

    Example::

        from telegrad.testing import processes

        def main(rank, n, init_method):
            rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=rpc.Options(init_method=init_method))
            result = rpc.rpc_sync(f"w{(rank + 1) % n}", max, args=(rank, 7))
            rpc.shutdown()
            return result

        if __name__ == "__main__":
            assert processes(2, main) == [7, 7]
    """
    with Processes(n, main, *args, method=method) as group:
        return group.results(timeout)


class Processes:
    """Running processes, for tests that kill some of them.

    See `processes` for the arguments. At the end of the context manager all processes are killed, by their ids.

    Example::

        from telegrad.testing import Processes

        def main(rank, n, init_method):
            return rank

        if __name__ == "__main__":
            with Processes(2, main) as group:
                assert group.results(timeout=30) == [0, 1]
    """

    def __init__(self, n: int, main: Callable[..., object], *args: object, method: str = "spawn") -> None:
        self._context = multiprocessing.get_context(method)
        self._folder = tempfile.mkdtemp(prefix="telegrad-test-")
        init_method = f"file://{self._folder}/store"
        self._children: list[BaseProcess] = []
        self._results: list[Connection] = []
        self._received: dict[int, tuple[bool, Any]] = {}  # what each process has sent: whether it worked, and what
        self._stacks: list[Connection] = []
        self._listening: set[int] = set()
        try:
            for rank in range(n):
                self._start(main, (rank, n, init_method, *args))
        except BaseException:  # for example, `main` cannot be pickled
            self.__exit__(None, None, None)
            raise

    def _start(self, main: Callable[..., object], args: tuple[object, ...]) -> None:
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
            send_result.close()  # only the child's end is left, so its death ends the connection
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
        """Process ids, by rank."""
        return [child.pid or 0 for child in self._children]

    def kill(self, rank: int) -> None:
        """Kill a process with SIGKILL, and wait until it has ended."""
        self._children[rank].kill()
        self._children[rank].join()

    def results(self, timeout: float = 60.0, ranks: Sequence[int] | None = None) -> list[Any]:
        """Wait for the return values, which may be asked for again.

        Args:
            timeout: limit in seconds for all of them together.
            ranks: the processes to wait for; all by default.

        Raises:
            ProcessError: as `processes`.
        """
        wanted = range(len(self._children)) if ranks is None else ranks
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        for rank in self._received.keys() & set(wanted):
            worked, value = self._received[rank]
            (results if worked else failures)[rank] = value
        open_ranks = {self._results[rank]: rank for rank in wanted if rank not in self._received}
        while open_ranks:
            left = min(deadline - time.monotonic(), _AFTER_FAILURE if failures else timeout)
            ready = wait(list(open_ranks), max(0.0, left))
            if not ready:
                failures |= self._stacks_of(list(open_ranks.values()), "hung, with")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = open_ranks.pop(connection)
                worked, value = self._received[rank] = self._receive(rank)
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
        """Return (True, the result) of a process, or (False, the error's text)."""
        try:
            result: tuple[bool, Any] = self._results[rank].recv()
        except (EOFError, OSError):  # before or within its message
            self._children[rank].join(_GOODBYE)
            return False, f"died with exit code {self._children[rank].exitcode}"
        except Exception as e:
            return False, f"returned a value that cannot be unpickled here: {e!r}"
        return result

    def _listens(self, rank: int) -> bool:
        """Return whether a process is ready for the signal to write its stacks.

        Before that, the signal would end it.
        """
        fd = self._stacks[rank].fileno()
        if rank not in self._listening and select.select([fd], [], [], 0.0)[0] and os.read(fd, len(_LISTENS)):
            self._listening.add(rank)
        return rank in self._listening

    def _stacks_of(self, ranks: Sequence[int], what: str) -> dict[int, str]:
        """Return the stacks of some processes by rank, with `what` as first line."""
        for rank in ranks:  # signal all first, so that they write at the same time
            pid = self._children[rank].pid
            if pid is not None and self._listens(rank) and self._children[rank].is_alive():
                os.kill(pid, _STACKS)
        begin = time.monotonic() + _STACKS_BEGIN
        texts = {}
        for rank in ranks:
            text = _read_stacks(self._stacks[rank].fileno(), begin) if rank in self._listening else ""
            texts[rank] = f"{what}\n{text or 'no stacks: the process is stopped, or has not reached its function'}"
        return texts


def _read_stacks(fd: int, begin: float) -> str:
    """Read until there is no output for a while.

    Returns "" if none begins before `begin`.
    """
    text = b""
    while select.select([fd], [], [], _STACKS_END if text else max(0.0, begin - time.monotonic()))[0]:
        part = os.read(fd, 1 << 16)
        if not part:
            break
        text += part
    return text.decode(errors="replace")


def _child(
    send_result: Connection, send_stacks: Connection, main: Callable[..., object], args: tuple[object, ...]
) -> None:
    gc.freeze()  # garbage of a forked parent may have to join threads that this process lacks
    # This descriptor stays open to the very end: Python's own threads may be the ones that hang.
    faulthandler.register(_STACKS, file=os.dup(send_stacks.fileno()), all_threads=True)
    os.write(send_stacks.fileno(), _LISTENS)
    try:
        result: tuple[bool, object] = (True, main(*args))
    except BaseException as e:
        result = (False, "".join(traceback.format_exception(e)))
    try:
        send_result.send(result)
    except Exception as e:  # a result that cannot be pickled
        send_result.send((False, "".join(traceback.format_exception(e))))
    send_result.close()
