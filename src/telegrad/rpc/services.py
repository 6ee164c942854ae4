"""Named services: values that workers find by a name instead of by an owner."""

import math
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from telegrad.errors import TelegradError, UnknownWorker, WorkerLost
from telegrad.group.records import sealed, unsealed
from telegrad.group.store_waits import Operation, StoreUnresponsive, within
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.rpc.groups import membership_of, seconds_of, wait_until
from telegrad.rref import RRef
from telegrad.timeouts import SharedDeadline
from telegrad.worker import Worker
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.interceptors import internal
from telegrad.worker.default_worker import open_worker

__all__ = ["get_service", "register_service"]

_KEY = "services"
_LEAST, _MOST = 0.1, 5.0  # s that one read of the store may take


def register_service(name: str, value: object, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Make a value available to the group under a name.

    The service ends with this worker. A name that this worker has registered gets the new value; references that others
    have got keep the old one.

    Args:
        name: of the service.
        value: a value, which this worker then owns, or an `RRef` to a value of any worker.
        timeout: limit in seconds; 0 is no limit, -1 the default timeout of calls.

    Raises:
        TypeError: the name is no string.
        TypeError, ValueError: the timeout is not a number.
        RuntimeError: a live worker has registered the name, this process is not in a group (`NotInitialized`), or the
            store of the group is gone, or does not reply in time.

    Example::

        rpc.register_service("scores", {"best": 0.5})
        print(rpc.get_service("scores").to_here())  # {'best': 0.5}
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a service is a string, but got {name!r}")
    worker = open_worker()
    service = membership_of(worker)
    own = sealed(_key(name), [name, worker.info.name, worker.info.id, worker.incarnation], worker.group)
    store, budget = service.log.store, SharedDeadline(seconds_of(worker, timeout) or 0.0)
    while True:
        found = within(budget.left(), lambda: store.get(_key(name)))
        if found is not None and found != own:
            _, owner, number, incarnation = unsealed(_key(name), found, worker.group, _registration)
            service.refresh()
            if service.log.view.has(number, incarnation):
                raise TelegradError(
                    f"worker {worker.info.name} cannot register the service {name}: worker {owner} has it, which is"
                    " alive. Choose another name."
                )
        services = _services(worker)
        with ExitStack() as undo:
            undo.callback(_put_back, services, name, services.get(name))
            services[name] = value if isinstance(value, RRef) else RRef(value)  # others may ask for it at once
            if within(budget.left(), partial(store.compare_set, _key(name), found, own)) == own:
                undo.pop_all()
                return


def _put_back(services: dict[str, RRef[Any]], name: str, before: RRef[Any] | None) -> None:
    if before is None:
        services.pop(name, None)
    else:
        services[name] = before


def get_service(name: str, timeout: float = UNSET_RPC_TIMEOUT) -> RRef[Any]:
    """Find a service, and wait until it is registered.

    Args:
        name: of the service.
        timeout: limit in seconds; 0 is no limit, -1 the default timeout of calls.

    Returns:
        A reference to its value.

    Raises:
        TypeError, ValueError: the timeout is not a number.
        RuntimeError: no live worker has registered the service in time: `WorkerLost` if the worker that had registered
            it is gone, otherwise `RpcTimeout`. Or this process is not in a group, or the store of the group is gone.

    Example::

        rpc.register_service("scores", {"best": 0.5})
        scores = rpc.get_service("scores", timeout=60)
        print(scores.rpc_sync().get("best"))  # 0.5
    """
    worker = open_worker()
    service = membership_of(worker)
    limit = seconds_of(worker, timeout)
    until = math.inf if limit is None else time.monotonic() + limit
    changed = threading.Event()
    gone: list[tuple[str, int]] = []
    silence: list[str] = []
    read: Operation[str | None] | None = None

    def find() -> int | None:
        nonlocal read
        read = read or Operation(lambda: service.log.store.get(_key(name)))
        try:
            found = read.result(min(max(until - time.monotonic(), _LEAST), _MOST))
        except StoreUnresponsive as e:
            silence[:] = [str(e)]
            return None  # the next attempt waits for the same read
        silence.clear()
        read = None
        if found is None:
            return None
        of, owner, number, incarnation = unsealed(_key(name), found, worker.group, _registration)
        service.refresh()
        if of == name and service.log.view.has(number, incarnation):
            return int(number)
        gone[:] = [(owner, incarnation)]
        return None

    try:
        with worker.members.on_change(changed.set):
            remedy = "Check that a worker registers it."
            number: int = wait_until(
                find, changed, limit, f"wait for the service {name}", remedy, lambda: "".join(silence)
            )
    except TimeoutError:
        if gone:
            owner, lost = gone[0]
            raise WorkerLost(owner, f"it had registered the service {name}, which is gone with it", lost) from None
        raise
    if number == worker.info.id:
        return _registered(name)
    check_blocking("get_service", "`await asyncio.to_thread(...)` for it")
    return worker.start_internal(number, _registered, (name,), limit or 0.0).wait()  # type: ignore[no-any-return]


def _registered(name: str) -> RRef[Any]:
    """Return the reference that this worker has registered."""
    worker = open_worker()
    found = _services(worker).get(name)
    if found is None:
        raise UnknownWorker((worker.info.name, worker.info.id), f"service {name}")
    return found


internal.add(_registered)


def _key(name: str) -> str:
    return f"service/{name}"


def _registration(name: str, owner: str, number: int, incarnation: int) -> tuple[str, str, int, int]:
    return str(name), str(owner), int(number), int(incarnation)


def _services(worker: Worker) -> dict[str, RRef[Any]]:
    found: dict[str, RRef[Any]] | None = worker.attachments.get(_KEY)
    if found is None:
        created: dict[str, RRef[Any]] = {}
        found = worker.attachments.setdefault(_KEY, created)
        if found is created:
            worker.on_close.append(created.clear)
    return found
