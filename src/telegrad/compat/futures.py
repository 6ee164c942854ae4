"""Functions of ``torch.futures`` that end at the first error of a call.

Torch documents this of ``wait_all`` and ``collect_all``. Its own do so only for errors set by C++ code. A future that
Python code fails (``set_exception``) counts as successful in C++ and raises when it is read: this is the only way to
keep the exception's type. So torch's functions would wait for all other futures before the program gets the error.
"""

from collections.abc import Iterable
from typing import Any

import torch.futures
from torch.futures import Future

from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.wait_all import failure_of, on_first_failure
from telegrad.worker.calls.wait_all import wait_all as _wait_all

__all__ = ["collect_all", "wait_all"]

_torch_collect_all = torch.futures.collect_all
_torch_wait_all = torch.futures.wait_all


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """Wait for all futures, as `telegrad.rpc.wait_all` does.

    If none of the futures is Telegrad's, torch's own function waits.
    """
    given = list(futures)
    if not any(isinstance(future, CallFuture) for future in given):
        return _torch_wait_all(given)
    return _wait_all(given)


def collect_all(futures: Iterable[Future[Any]]) -> Future[list[Future[Any]]]:
    """Return a future of the list of all futures, which are then done.

    It fails at the first error of one of them. If none of the futures is Telegrad's, torch's own function makes it.
    """
    given = list(futures)
    ours = [future for future in given if isinstance(future, CallFuture)]
    if not ours:
        return _torch_collect_all(given)
    collected: CallFuture[list[Future[Any]]] = CallFuture._of(ours[0]._logging_calls())

    def decide(failed: Future[Any] | None) -> None:
        error = None if failed is None else failure_of(failed)
        if error is None:
            collected._succeed(given)
            return
        for future in ours:
            future._mark_read()
        collected._fail(error)

    on_first_failure(given, decide)
    return collected
