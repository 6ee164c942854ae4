"""Groups of workers in one process, for tests that take milliseconds."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]

from telegrad.options import RpcBackendOptions
from telegrad.rpc import Worker
from telegrad.testing.leaks import ResourceSnapshot, assert_quiescent
from telegrad.testing.waiting import run_all
from telegrad.worker import live_workers

__all__ = ["Cluster", "cluster"]

T = TypeVar("T")

_BEYOND_TIMEOUT = 15.0  # s for a timed-out shutdown to end: final messages, handlers that still run


class Cluster:
    """Workers of a group in this process, in the order of their ranks.

    Supports ``c[0]``, ``len(c)`` and ``for worker in c``. The workers communicate as processes do: through shared
    memory or sockets, with everything serialized. Created by `cluster`.

    Attributes:
        workers: those that have not been shut down through this object.
        store: the store of their rendezvous.

    Example::

        with cluster(2) as group:
            names = group.on_each(lambda rank: rpc.get_worker_info().name)
            assert names == ["w0", "w1"]
    """

    def __init__(self, workers: list[Worker], store: Any) -> None:
        self.workers: list[Worker] = workers
        self.store = store

    def __len__(self) -> int:
        return len(self.workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers)

    def __getitem__(self, index: int) -> Worker:
        return self.workers[index]

    def on_each(self, function: Callable[[int], T], timeout: float = 60.0) -> list[T]:
        """Run a function for each worker at the same time, as in separate processes.

        Args:
            function: called with the worker's rank, with that worker as the current one.
            timeout: limit in seconds for all together.

        Returns:
            The results in the order of ranks.

        Raises:
            errors of the function; AssertionError: it did not end in time.
        """

        def on(worker: Worker) -> Callable[[], T]:
            def run() -> T:
                with worker:
                    return function(worker.info.id)

            return run

        return run_all([on(worker) for worker in self.workers], timeout)

    def shutdown(self, timeout: float = 20.0) -> None:
        """Shut down all workers gracefully, at the same time, and drop them.

        Args:
            timeout: limit in seconds of their wait for pending work; more than 0.

        Raises:
            RuntimeError: a shutdown failed.
        """
        workers, self.workers = self.workers, []
        limit = 2 * timeout + _BEYOND_TIMEOUT
        run_all([lambda worker=worker: worker.shutdown(timeout=timeout) for worker in workers], limit)  # type: ignore[misc]

    def close(self) -> None:
        """Shut down all workers at once without waiting for their work, and drop them."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.shutdown(graceful=False)


@contextmanager
def cluster(
    n: int = 2,
    options: RpcBackendOptions | None = None,
    *,
    names: str = "w{}",
    store: object = None,
    dynamic: bool = False,
    current: int | None = 0,
    graceful: bool = True,
    check: bool = True,
) -> Iterator[Cluster]:
    """Run a group of workers in this process.

    The workers are shut down at the end, gracefully if the body did not raise.

    Args:
        n: number of workers.
        options: of all of them.
        names: name of a worker; the braces stand for its rank.
        store: store of their rendezvous; by default a new one.
        dynamic: join one after the other, as a dynamic group.
        current: rank of the worker that `telegrad.rpc` uses in the body; None for none.
        graceful: False ends them without waiting for pending work.
        check: check for leaks at the end: pending work, threads, child processes and file descriptors. In a process
            with other workers, only check for pending work.

    Raises:
        LeakError: something leaked; only if the body did not raise.

    Example::

        with cluster(2):
            assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    """
    # With other workers in the process, their resources cannot be distinguished from those of the group.
    alone = all(worker.closed for worker in live_workers())
    before = ResourceSnapshot.now() if check and alone else None
    store = HashStore() if store is None else store
    group = Cluster(_join(n, options, names, store, dynamic), store)
    cores = [worker._worker for worker in group]
    try:
        with ExitStack() as stack:
            if current is not None:
                stack.enter_context(group[current])
            yield group
    except BaseException:
        group.close()
        raise
    if graceful:
        whole = len(group) == n
        group.shutdown()
        if check and whole:
            for rank in range(n):
                assert_quiescent(cores[rank], references=False)
    else:
        group.close()
    if before is not None:
        before.assert_not_grown()


def _join(n: int, options: RpcBackendOptions | None, names: str, store: object, dynamic: bool) -> list[Worker]:
    joined: list[Worker] = []
    lock = threading.Lock()

    def join(rank: int) -> Worker:
        worker = Worker(names.format(rank), rank, None if dynamic else n, options, store=store)
        with lock:
            joined.append(worker)
        return worker

    try:
        if dynamic:
            return [join(rank) for rank in range(n)]
        return run_all([lambda rank=rank: join(rank) for rank in range(n)])  # type: ignore[misc]
    except BaseException:
        for worker in joined:
            worker.shutdown(graceful=False)
        raise
