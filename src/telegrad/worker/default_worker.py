"""Worker that API calls use if they name none."""

from telegrad.errors import NotInitialized
from telegrad.worker.scope import current
from telegrad.worker.worker import Worker

__all__ = ["current_worker", "open_worker", "set_default_worker"]

_default: list[Worker | None] = [None]


def current_worker() -> Worker | None:
    """Return the worker of this context, else the default of the process, or None."""
    scope = current.get()
    if scope is not None and (scope.worker.fenced or not scope.worker.closed):
        worker: Worker = scope.worker
        return worker
    return _default[0]


def open_worker() -> Worker:
    """Return the current worker.

    Raises:
        NotInitialized: There is no worker, or the worker is closed.
    """
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    worker.require_open()
    return worker


def set_default_worker(worker: Worker | None) -> None:
    """Set the default worker of the process."""
    _default[0] = worker
