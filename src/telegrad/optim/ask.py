"""Calls of several owners at the same time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from telegrad.optim.failures import all_of
from telegrad.optim.owner import require_worker
from telegrad.worker import Worker
from telegrad.worker.scope import outside_contexts

__all__ = ["Request", "ask", "failures_of"]

Request = tuple[Callable[..., Any], tuple[object, ...]]
"""A function and its arguments."""


def ask(what: str, requests: Mapping[int, Request]) -> list[Any]:
    """Call a function on each owner at the same time, and return the results.

    Args:
        what: what has failed if one of them fails, for the error.
        requests: by id of the owner.

    Raises:
        errors of the functions; those of several owners as one `ExceptionGroup` that is of all their types.
    """
    worker = require_worker()
    here = worker.info.id
    futures: list[tuple[int, Any]] = []
    # This worker's own call comes last, because it runs on this thread; that also decides its turn at the step lock.
    # Without one, this thread waits for the last of the other owners: this is faster than a future.
    ordered = sorted(requests, key=lambda owner: owner == here)
    # Without gradients in plain mode: such calls are outside of the plain context, too.
    recorded = torch.is_grad_enabled() and worker.autograd.outside is None
    with outside_contexts(), torch.set_grad_enabled(recorded):
        for owner in ordered[:-1]:
            futures.append((owner, worker.rpc_async(owner, *requests[owner])))
        for owner in ordered[-1:]:
            futures.append((owner, _Done(worker, owner, *requests[owner])))
        results = dict(zip(ordered, _all_results(worker, what, futures), strict=True))
    return [results[owner] for owner in requests]


def failures_of(requests: Mapping[int, Request]) -> dict[int, Exception]:
    """Call a function on each owner at the same time; return the errors by owner.

    Args:
        requests: by id of the owner.
    """
    worker = require_worker()
    futures: dict[int, Any] = {}
    failures: dict[int, Exception] = {}
    with outside_contexts(), torch.no_grad():
        for owner in sorted(requests, key=lambda owner: owner == worker.info.id):  # see `ask`
            try:
                if owner == worker.info.id:
                    futures[owner] = _Done(worker, owner, *requests[owner])
                else:
                    futures[owner] = worker.rpc_async(owner, *requests[owner])
            except Exception as e:
                failures[owner] = e
        for owner, future in futures.items():
            try:
                future.wait()
            except Exception as e:
                failures[owner] = e
    return failures


class _Done:
    """Completed call of this thread, with a future's `wait`."""

    def __init__(self, worker: Worker, to: int, function: Callable[..., Any], args: tuple[object, ...]) -> None:
        self._error: Exception | None = None
        self._value: Any = None
        try:
            self._value = function(*args) if to == worker.info.id else worker.rpc_sync(to, function, args)
        except Exception as e:
            self._error = e

    def wait(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def _all_results(worker: Worker, what: str, futures: Sequence[tuple[int, Any]]) -> list[Any]:
    """Wait for all futures and return their results.

    Raises:
        errors of the futures, combined.
    """
    results, failures = [], []
    for owner, future in futures:
        try:
            results.append(future.wait())
        except Exception as e:
            failures.append((worker.members.name_of(owner), e))
    if failures:
        raise all_of(what, failures)
    return results
