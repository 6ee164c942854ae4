"""Checks for leaks of a worker or a process."""

import gc
import os
import threading
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Self, cast

from telegrad.autograd.service import Autograd
from telegrad.rpc import Worker
from telegrad.streams.service import Streams
from telegrad.testing.waiting import eventually
from telegrad.worker import Worker as WorkerCore

__all__ = ["LeakError", "ResourceSnapshot", "assert_quiescent"]

_FD_FOLDER = Path("/proc/self/fd")
_BEFORE_COLLECTING = 0.1  # s
_THREADS_OF_TELEGRAD = "telegrad-"
_CUDA = "/dev/nvidia"  # files of its driver, which a process opens with its first use of CUDA and never closes
_WITH_CUDA = (_CUDA, "anon_inode:[eventfd]", "pipe:")  # what it opens at the same time

# Fields of `RRefStats` that must be zero without any references, and those that must be zero in any case.
_ALL_GONE = ("owners", "forks", "users", "handles")
_ALL_QUIET = ("expected", "pending_users", "pins", "queued", "strays")


class LeakError(AssertionError):
    """Resource that was not released.

    Example::

        from telegrad.testing import LeakError, assert_quiescent

        with cluster(2, check=False) as group:
            rref = rpc.RRef(torch.ones(2))
            try:
                assert_quiescent(group[0], timeout=0.1)
            except LeakError as error:
                print(error)  # worker w0 has left: ...
    """


def assert_quiescent(worker: Worker | WorkerCore, timeout: float = 5.0, *, references: bool = True) -> None:
    """Check that a worker of this process has no pending work and no leaks.

    There are no pending calls or requests, no outstanding messages of the reference protocol and no open autograd
    context. With ``references`` there are also no references to or from the worker, and no received tensors in use:
    delete those of the test first. A worker that has been shut down must also have no threads, and no contexts that
    were never exited.

    Args:
        worker: a worker of this process, running or shut down.
        timeout: limit in seconds for pending work to end.
        references: also check for references and tensors that are merely alive.

    Raises:
        LeakError: something leaked, which the text names.

    Example::

        from telegrad.testing import assert_quiescent

        with cluster(2) as group:
            rpc.rpc_sync("w1", max, args=(1, 2))
            assert_quiescent(group[0])
    """
    core = worker._worker if isinstance(worker, Worker) else worker
    for limit in (min(timeout, _BEFORE_COLLECTING), timeout):
        try:
            eventually(lambda: not _left(core, references), limit)
            return
        except AssertionError:
            gc.collect()  # a reference cycle of an exception and its traceback may keep it alive
    left = ", ".join(_left(core, references)) or "nothing after the timeout"
    raise LeakError(f"worker {core.info.name} has left: {left}")


def _left(core: WorkerCore, references: bool) -> list[str]:
    stats = core.engine.stats()
    counts: dict[str, object] = {key: stats[key] for key in ("pending_calls", "queued_requests", "running_requests")}
    table = core.references.stats()
    watched = () if core.closed else _ALL_QUIET + (_ALL_GONE if references else ())
    counts |= {f"{key} of references": getattr(table, key) for key in watched}
    counts["values"] = len(core.references.values) if references or core.closed else 0
    counts["pending creations"] = core.references.pending_creations
    counts |= cast("Autograd", core.autograd).left()
    if (streams := Streams.existing(core)) is not None:
        counts |= streams.left()
    if references:
        counts["buffers in use"] = stats["live_blocks"]
        counts["multicast buffers"] = stats["multicast_buffers"]
    if core.closed:
        counts["threads"] = sum(t.name.startswith(f"telegrad-{core.info.name}-") for t in core.pool.threads())
    return [f"{count} {key}" for key, count in counts.items() if count]


@dataclass(frozen=True)
class ResourceSnapshot:
    """Resources of this process at one moment; compare with `assert_not_grown`.

    Attributes:
        fds: open file descriptors.
        threads: Telegrad's threads.
        children: live child processes of `multiprocessing`, by pid.

    Example::

        from telegrad.testing import ResourceSnapshot

        before = ResourceSnapshot.now()
        with cluster(2):
            rpc.rpc_sync("w1", max, args=(1, 2))
        before.assert_not_grown()
    """

    fds: frozenset[int]
    threads: frozenset[threading.Thread]
    children: frozenset[int]

    @classmethod
    def now(cls) -> Self:
        """Return the current resources."""
        return cls(
            _open_fds(),
            frozenset(t for t in threading.enumerate() if t.name.startswith(_THREADS_OF_TELEGRAD)),
            frozenset(child.pid for child in active_children() if child.pid is not None),
        )

    def assert_not_grown(self, timeout: float = 5.0, *, fds: bool = True) -> None:
        """Check that no descriptors, threads or child processes were added since.

        The first use of CUDA adds descriptors for good, among them eventfds and pipes: then these do not count.

        Args:
            timeout: limit in seconds for threads and child processes to end.
            fds: also check descriptors.

        Raises:
            LeakError: the process has more, which the text names.
        """
        for limit in (min(timeout, _BEFORE_COLLECTING), timeout):
            try:
                eventually(lambda: not self._grown(self.now(), fds), limit)
                return
            except AssertionError:
                gc.collect()
        raise LeakError(f"this process has more than before: {'; '.join(self._grown(self.now(), fds))}")

    def _grown(self, now: "ResourceSnapshot", fds: bool) -> list[str]:
        grown = []
        if fds and len(now.fds) > len(self.fds):
            added = {fd: _target_of(fd) for fd in sorted(now.fds - self.fds)}
            if any(target.startswith(_CUDA) for target in added.values()):
                added = {fd: target for fd, target in added.items() if not target.startswith(_WITH_CUDA)}
            if len(added) > len(self.fds - now.fds):
                grown.append(f"descriptors {', '.join(f'{fd} ({target})' for fd, target in added.items())}")
        if now.threads - self.threads:
            grown.append(f"threads {', '.join(sorted(t.name for t in now.threads - self.threads))}")
        if now.children - self.children:
            grown.append(f"child processes {', '.join(map(str, sorted(now.children - self.children)))}")
        return grown


def _open_fds() -> frozenset[int]:
    # The listed folder's own descriptor is closed again when its entry is checked.
    return frozenset(int(name) for name in os.listdir(_FD_FOLDER) if os.path.lexists(_FD_FOLDER / name))


def _target_of(fd: int) -> str:
    try:
        return os.readlink(_FD_FOLDER / str(fd))
    except OSError:
        return "closed"
