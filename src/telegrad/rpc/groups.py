"""Events of the group of a worker, and operations of all its live members."""

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from telegrad.errors import NotInitialized, RpcTimeout, UnknownWorker, WorkerLost
from telegrad.rpc import api
from telegrad.rpc.collectives import broadcast_to, gather
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.types import To, WorkerInfo
from telegrad.waits import wait_for
from telegrad.worker import Worker
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.callables import require_plain_function
from telegrad.worker.default_worker import open_worker
from telegrad.worker.membership.events import JOIN, LEAVE, LOSS, Subscription
from telegrad.worker.membership.service import MembershipService

__all__ = ["all_gather", "barrier", "broadcast", "on_join", "on_leave", "on_lost", "wait_for_worker"]

_POLL = 0.25  # s between two checks of the store for a worker that has not joined

_STORE_REMEDY = "Without the store, a worker learns of no change of the group. Check the host of the store."


def membership_of(worker: Worker) -> MembershipService:
    """Return the membership of a worker.

    Raises:
        NotInitialized: The worker is not in a group any more.
    """
    if worker.membership is None:
        raise NotInitialized
    return worker.membership


def seconds_of(worker: Worker, timeout: float) -> float | None:
    """Return a timeout in seconds, None for no limit.

    Raises:
        TypeError, ValueError: The timeout is not a number.
    """
    return worker.calls.timeout(timeout) / 1e9 or None


def _subscribe(kind: str, function: Callable[..., object]) -> Subscription:
    remedy = "Pass a plain function; it may start the coroutine with asyncio.run."
    require_plain_function(function, "a function for events of the group", remedy)
    worker = open_worker()

    def run(*arguments: object) -> None:
        with worker:
            function(*arguments)

    return membership_of(worker).events.subscribe(kind, run)


def on_join(function: Callable[[WorkerInfo], object]) -> Subscription:
    """Call a function when a worker joins the group, or comes back to it.

    Members that are in the group already cause no call. Calls happen in the order of the events, one at a time, on a
    thread of this worker. The function may make remote calls; later events wait until it returns.

    Args:
        function: called with the WorkerInfo of the new member.

    Returns:
        The subscription; its ``remove()`` ends the calls.

    Raises:
        TypeError: the function is not callable, or is an ``async def``.
        RuntimeError: this process has not joined a group (`NotInitialized`).

    Example::

        subscription = rpc.on_join(lambda info: print(info.name, "is here"))
        subscription.remove()
    """
    return _subscribe(JOIN, function)


def on_leave(function: Callable[[WorkerInfo], object]) -> Subscription:
    """Call a function when a worker leaves the group after its shutdown.

    Args:
        function: called with the WorkerInfo of the member, in the manner of `on_join`.

    Returns:
        The subscription; its ``remove()`` ends the calls.

    Raises:
        TypeError: the function is not callable, or is an ``async def``.
        RuntimeError: this process has not joined a group (`NotInitialized`).

    Example::

        subscription = rpc.on_leave(lambda info: print(info.name, "has left"))
        subscription.remove()
    """
    return _subscribe(LEAVE, function)


def on_lost(function: Callable[[WorkerInfo, str], object]) -> Subscription:
    """Call a function when the group loses a member.

    That is so if the member's process has died, or is silent for the lifetime of a lease. A broken connection to a
    member that is alive is no loss.

    Args:
        function: called with the WorkerInfo of the member and the reason, in the manner of `on_join`.

    Returns:
        The subscription; its ``remove()`` ends the calls.

    Raises:
        TypeError: the function is not callable, or is an ``async def``.
        RuntimeError: this process has not joined a group (`NotInitialized`).

    Example::

        subscription = rpc.on_lost(lambda info, why: print(info.name, "is lost:", why))
        subscription.remove()
    """
    return _subscribe(LOSS, function)


def wait_for_worker(name: str | int, timeout: float = UNSET_RPC_TIMEOUT) -> WorkerInfo:
    """Wait until a worker is in the group of this worker, and not lost.

    Args:
        name: the worker's name or id.
        timeout: limit in seconds; 0 is no limit, -1 the default timeout of calls.

    Returns:
        The WorkerInfo of the worker.

    Raises:
        TypeError, ValueError: the timeout is not a number.
        RuntimeError: the worker has not joined in time (`RpcTimeout`), or this process is not in a group.

    Example::

        server = rpc.wait_for_worker("worker1", timeout=60)
        rpc.rpc_sync(server, max, args=(1, 2))
    """
    worker = open_worker()
    service = membership_of(worker)
    limit = seconds_of(worker, timeout)
    changed = threading.Event()

    def find() -> WorkerInfo | None:
        try:
            info = worker.members.resolve(name)
        except (UnknownWorker, WorkerLost):
            return None
        if info.id in worker.members.lost:
            worker.ensure_connected([info.id])
            return None
        return info

    with worker.members.on_change(changed.set):
        remedy = "Check that it is started, with the address of this group."
        what = f"wait for worker {name}"
        found: WorkerInfo = wait_until(find, changed, limit, what, remedy, lambda: service.outage.reason)
        return found


def wait_until(
    find: Callable[[], Any],
    changed: threading.Event,
    limit: float | None,
    what: str,
    remedy: str,
    outage: Callable[[], str] = str,
) -> Any:
    """Call `find` until it returns a value: when the event is set, and periodically.

    Args:
        find: The function.
        changed: The event.
        limit: Limit in seconds; None for none.
        what: Name of the wait.
        remedy: What the program can do after the limit.
        outage: Returns why the store of the group does not reply; "" if it does, as by default.

    Raises:
        RpcTimeout: It has returned None for `limit` seconds.
        TelegradError: The thread runs the coroutines of a worker.
    """
    until = math.inf if limit is None else time.monotonic() + limit
    while True:
        changed.clear()
        is_late = time.monotonic() >= until
        found = find()
        if found is not None:
            return found
        if limit is not None and is_late:
            why = outage()
            raise RpcTimeout(limit, what, why or "no answer", _STORE_REMEDY if why else remedy)
        check_blocking(f"the {what}", "`await asyncio.to_thread(...)` for it")
        wait_for(changed, max(min(_POLL, until - time.monotonic()), 0.0))


def _names(worker: Worker, workers: Iterable[To] | None) -> set[str]:
    """Return the names of the workers that take part, by default of all live members."""
    if isinstance(workers, (str, int, WorkerInfo)):
        raise TypeError(f"workers has to be a list or set of workers, not {workers!r}: pass [{workers!r}]")
    if workers is not None:
        names = {worker.members.resolve(each).name for each in workers}
        if not names:
            raise ValueError("workers is empty: name the workers that take part, or leave it out for all live members")
        return names
    members = membership_of(worker).log.view.members.values()
    return {worker.info.name, *(member.name for member in list(members))}


def all_gather(
    value: object, workers: Iterable[To] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Exchange values with other workers: each gets the values of all.

    All of these workers have to call this, with the same set of workers. It succeeds only if all were in it at the same
    moment. After an error on some of them, call it once more on all: they get the values of these calls.

    Args:
        value: this worker's value; anything that a call could return.
        workers: the workers that take part: names, ids or WorkerInfos, with this one. By default the live members of
            the group. If members join and leave meanwhile, name the workers.
        timeout: limit in seconds; 0 is no limit, -1 the default timeout of calls.

    Returns:
        The values by worker name.

    Raises:
        TypeError: ``workers`` is a single worker, or the timeout is not a number.
        ValueError: ``workers`` is empty, or does not contain this worker; or the timeout is NaN.
        RuntimeError: some workers did not take part in time (also a ``TimeoutError``), left, or are lost
            (`WorkerLost`); the text names them.

    Example::

        def count_samples():
            return rpc.all_gather(10, ["worker1"])

        print(rpc.rpc_sync("worker1", count_samples))  # {'worker1': 10}
    """
    worker = open_worker()
    limit = seconds_of(worker, timeout) or 0.0
    return gather(
        worker, value, _names(worker, workers), limit, api._gather_to_leader, api._broadcast_to_followers, "all_gather "
    )


def barrier(workers: Iterable[To] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Wait until several workers have called this.

    Args:
        workers, timeout: as of `all_gather`.

    Raises:
        TypeError, ValueError: as of `all_gather`.
        RuntimeError: as of `all_gather`.

    Example::

        def wait():
            rpc.barrier(["worker1"])

        rpc.rpc_sync("worker1", wait)
    """
    all_gather(None, workers, timeout)


def broadcast(
    value: object, source: To, workers: Iterable[To] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """Send a value of one worker to others; it is serialized once, as by `multicast`.

    All of these workers have to call this, with the same source and set of workers. The source waits until all others
    have called it. After an error, as of `all_gather`.

    Args:
        value: the value, on the source; ignored on the others.
        source: the worker that sends its value: its name, id or WorkerInfo.
        workers, timeout: as of `all_gather`; the source takes part as well.

    Returns:
        The value of the source.

    Raises:
        TypeError, ValueError: as of `all_gather`.
        RuntimeError: the source did not send its value in time, left, or is lost; or, on the source, another worker
            did not take part or did not receive the value.

    Example::

        def receive():
            return rpc.broadcast(torch.ones(2), "worker1", ["worker1"])

        weights = rpc.rpc_sync("worker1", receive)
    """
    worker = open_worker()
    name = worker.members.resolve(source).name
    names = _names(worker, workers) | {name}
    limit = seconds_of(worker, timeout) or 0.0
    return broadcast_to(worker, value, name, names, limit, api._gather_to_leader, api._broadcast_to_followers)
