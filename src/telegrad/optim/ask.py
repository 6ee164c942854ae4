"""Calls of several owners at the same time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from telegrad.errors import SHUT_DOWN, UnknownWorker, WorkerLost
from telegrad.optim.failures import all_of
from telegrad.optim.owner import require_worker
from telegrad.rref import RRef
from telegrad.rref.usable_id import usable_id
from telegrad.worker import Worker
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.callables import name_of
from telegrad.worker.calls.operation_timeouts import of_operation
from telegrad.worker.scope import outside_contexts

__all__ = ["Request", "ask", "check_thread", "failures_of"]


class Request(NamedTuple):
    """Function to call, and its arguments.

    Attributes:
        of: a value on the owner; the two numbers of its id come first among the arguments.
    """

    function: Callable[..., Any]
    args: tuple[object, ...]
    of: RRef[Any] | None = None

    def all_arguments(self) -> tuple[object, ...]:
        """Return the arguments of the function.

        Raises:
            OwnerLost: the owner of the value is lost.
        """
        return self.args if self.of is None else (*usable_id(self.of), *self.args)


def check_thread(operation: str, owners: Iterable[int]) -> None:
    """Raise an error in an event loop, if another worker is among the owners.

    Before the first call: an error between two calls would leave the owners in different states.

    Args:
        operation: what the program has called.
        owners: ids of the owners.
    """
    if set(owners) - {require_worker().info.id}:
        check_blocking(operation, "`await asyncio.to_thread(...)` for it")


def ask(operation: str, requests: Mapping[int, Request]) -> list[Any]:
    """Call a function on each owner at the same time, and return the results.

    Args:
        operation: what the program has called, for errors.
        requests: by id of the owner.

    Raises:
        errors of the functions; those of several owners as one `ExceptionGroup` that is of all their types.
    """
    worker = require_worker()
    here = worker.info.id
    check_thread(operation, requests)
    futures: list[tuple[int, Waitable]] = []
    # This worker's own call comes last, because it runs on this thread; that also decides its turn at the step lock.
    # Without one, this thread waits for the last of the other owners: this is faster than a future.
    ordered = sorted(requests, key=lambda owner: owner == here)
    # Without gradients in plain mode: such calls are outside of the plain context, too.
    recorded = torch.is_grad_enabled() and worker.autograd.outside is None
    with outside_contexts(), torch.set_grad_enabled(recorded):
        for owner in ordered[:-1]:
            futures.append((owner, _started(worker, owner, requests[owner])))
        for owner in ordered[-1:]:
            futures.append((owner, _called(worker, owner, requests[owner])))
        results = dict(zip(ordered, _all_results(worker, operation, requests, futures), strict=True))
    return [results[owner] for owner in requests]


def failures_of(requests: Mapping[int, Request]) -> dict[int, Exception]:
    """Call a function on each owner at the same time; return the errors by owner.

    Args:
        requests: by id of the owner.
    """
    worker = require_worker()
    futures: dict[int, Waitable] = {}
    failures: dict[int, Exception] = {}
    with outside_contexts(), torch.no_grad():
        for owner in sorted(requests, key=lambda owner: owner == worker.info.id):  # see `ask`
            call = _called if owner == worker.info.id else _started
            futures[owner] = call(worker, owner, requests[owner])
        for owner, future in futures.items():
            try:
                future.wait()
            except Exception as e:
                failures[owner] = e
    return failures


class Waitable(Protocol):
    """Result of a call, or its error."""

    def wait(self) -> Any: ...


def _started(worker: Worker, to: int, request: Request) -> Waitable:
    """Start a call.

    Its errors come from `wait`, so that the calls of the other owners are made as well.
    """
    try:
        return worker.rpc_async(to, request.function, request.all_arguments())
    except Exception as e:
        return _Ended(worker, to, error=e)


def _called(worker: Worker, to: int, request: Request) -> Waitable:
    """Make a call on this thread."""
    try:
        function, args = request.function, request.all_arguments()
        return _Ended(worker, to, function(*args) if to == worker.info.id else worker.rpc_sync(to, function, args))
    except Exception as e:
        return _Ended(worker, to, error=e)


class _Ended:
    """Call that has ended, or that could not be started."""

    def __init__(self, worker: Worker, to: int, value: object = None, error: Exception | None = None) -> None:
        if isinstance(error, UnknownWorker):  # it has left
            members = worker.members
            error = WorkerLost(members.name_of(to), SHUT_DOWN, members.last_lost(to))
        self._error = error
        self._value = value

    def wait(self) -> Any:
        error, self._error = self._error, None  # the error refers to this frame
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error


def _all_results(
    worker: Worker, operation: str, requests: Mapping[int, Request], futures: Sequence[tuple[int, Waitable]]
) -> list[Any]:
    """Wait for all futures and return their results.

    Raises:
        errors of the futures, combined.
    """
    results, failures = [], []
    for owner, future in futures:
        try:
            results.append(future.wait())
        except Exception as e:
            error = of_operation(e, (name_of(requests[owner].function),), operation)
            failures.append((worker.members.name_of(owner), error))
    if failures:
        raise all_of(f"{operation} failed", failures)
    return results
