"""The worker that code belongs to where it does not say."""

from telegrad.errors import NotInitialized
from telegrad.worker.scope import current
from telegrad.worker.worker import Worker

__all__ = ["current_worker", "open_worker", "set_default_worker"]

_default: list[Worker | None] = [None]


def current_worker() -> Worker | None:
    """The worker of this context, else the process's default one; None if there is none."""
    scope = current.get()
    if scope is not None and not scope.worker.closed:
        worker: Worker = scope.worker
        return worker
    return _default[0]


def open_worker() -> Worker:
    """The current worker.

    Raises:
        NotInitialized: there is none, or it has been closed.
    """
    worker = current_worker()
    if worker is None or worker.closed:
        raise NotInitialized
    return worker


def set_default_worker(worker: Worker | None) -> None:
    """What `init_rpc` made."""
    _default[0] = worker
