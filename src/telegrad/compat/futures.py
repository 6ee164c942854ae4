"""``torch.futures.wait_all`` as torch documents it, for Telegrad's futures as well.

It is to leave at the first error. Torch's own does so only for errors that its C++ code has set.
A future that Python code fails (``set_exception``) is, to C++, one that has succeeded and raises
when it is read, which is the only way to keep the exception's type; so torch's ``wait_all`` would
wait for all the others before it raised.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch.futures
from torch.futures import Future

from telegrad.worker.future import CallFuture

__all__ = ["install_wait_all", "wait_all"]

_torch_wait_all = torch.futures.wait_all


def wait_all(futures: list[Future[Any]]) -> list[Any]:
    """Waits for all of these futures and returns their values; raises as soon as one of them has failed.

    Args:
        futures: any of Telegrad's and of torch's, mixed.

    Raises:
        what the first future that failed raises; the others are not waited for.
    """
    if not any(isinstance(future, CallFuture) for future in futures):
        return _torch_wait_all(futures)
    failed = _first_failure(futures)
    if failed is not None:
        failed.wait()
    return [future.wait() for future in futures]


def _first_failure(futures: Sequence[Future[Any]]) -> Future[Any] | None:
    """Waits until one has failed, which it returns, or all have succeeded."""
    decided: Future[Future[Any] | None] = Future()
    lock = threading.Lock()
    left = len(futures)

    def completed(future: Future[Any]) -> None:
        nonlocal left
        outcome = future if _has_failed(future) else None
        with lock:
            if left <= 0:
                return  # decided already
            left = 0 if outcome is not None else left - 1
            if left:
                return
        decided.set_result(outcome)

    for future in futures:
        future.add_done_callback(lambda _, future=future: completed(future))  # type: ignore[misc]
    return decided.wait()


def _has_failed(future: Future[Any]) -> bool:
    if isinstance(future, CallFuture):
        return future.failure() is not None
    try:
        future.value()
    except BaseException:
        return True
    return False


def install_wait_all() -> None:
    """Puts :func:`wait_all` in the place of torch's."""
    torch.futures.wait_all = wait_all
