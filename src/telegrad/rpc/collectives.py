"""Operations of several workers together: gather, barrier, broadcast.

As in torch, the worker with the smallest name is the leader of a gathering: it collects a value from each worker and
sends all values to each. The source is the leader of a broadcast. `telegrad.rpc.gathering` has the rules.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from torch.futures import Future

from telegrad.errors import RpcTimeout, TelegradError, WorkerLost
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.rpc.gathering import AllGatherStates, Offer, Operation, OperationId
from telegrad.rpc.gathering_failures import (
    GatheringTimeout,
    GroupMemberLost,
    LostWhileGathering,
    broken_connections,
    failure_in,
    failure_of_calls,
    find_loss,
    notice_of,
)
from telegrad.rpc.gathering_handlers import gathering_of, is_waiting, receive_failure, withdraw
from telegrad.timeouts import WaitLimit, nanoseconds
from telegrad.waits import wait_for
from telegrad.wire.ints import FLAG_INTERNAL
from telegrad.worker import Worker
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.multicast import call_many

__all__ = ["AllGatherStates", "broadcast_to", "gather"]

T = TypeVar("T")

_SHORTEST = 1e-3  # s; timeout of a question for which no time is left, because 0 is none


def gather(
    worker: Worker,
    value: object,
    names: set[str],
    timeout: float,
    gather_to_leader: Callable[..., object],
    broadcast: Callable[..., object],
    purpose: str = "",
) -> dict[str, Any]:
    """Gather as `telegrad.rpc.api._all_gather` does.

    Args:
        worker: this worker.
        value: its value.
        names: the workers that take part.
        timeout: seconds; 0 is no limit; -1 is the default timeout for the calls and no limit for the wait.
        gather_to_leader: runs on the leader, with the value of each follower.
        broadcast: runs on each follower, with all values.
        purpose: gatherings with different purposes do not affect each other.

    Raises:
        TypeError: the timeout is not a number.
        ValueError: this worker is not one of those that take part, or the timeout is NaN.
        TelegradError: some workers did not take part in time, or are lost; or the thread runs the coroutines of a
            worker, and nothing has been done.
    """
    me, leader = worker.info.name, min(names)
    _check_caller(me, names)
    is_unset = timeout == UNSET_RPC_TIMEOUT
    seconds = None if is_unset else nanoseconds(timeout) / 1e9 or None
    rpc_timeout = worker.calls.default_timeout / 1e9 if is_unset else seconds or 0.0
    limit = WaitLimit(seconds)
    return _run(_Call(worker, names, leader, limit, rpc_timeout, is_unset, gather_to_leader, broadcast), purpose, value)


def broadcast_to(
    worker: Worker,
    value: object,
    source: str,
    names: set[str],
    timeout: float,
    gather_to_leader: Callable[..., object],
    broadcast: Callable[..., object],
) -> Any:
    """Return the value of one worker on all of them, once all take part.

    Args:
        worker: this worker.
        value: the value, on the source.
        source: name of the source.
        names: the workers that take part.
        timeout: seconds; 0 is no limit.
        gather_to_leader, broadcast: as of `gather`.

    Raises:
        ValueError: this worker is not one of those that take part.
        TelegradError: some workers did not take part in time, left, or are lost; or the thread runs the coroutines of a
            worker, and nothing has been done.
    """
    _check_caller(worker.info.name, names)
    limit = WaitLimit(timeout or None)
    call = _Call(worker, names, source, limit, timeout, False, gather_to_leader, broadcast)
    return _run(call, f"broadcast of {source} ", value if source == worker.info.name else None)[source]


def _check_caller(me: str, names: set[str]) -> None:
    """Raise an error if this worker takes no part, or its thread must not wait.

    Before anything is sent: the other workers would take part in an operation that this worker has not made.
    """
    if me not in names:
        raise ValueError(
            f"worker {me} called an operation of the workers {', '.join(sorted(names))}, of which it is none:"
            " name it among the workers, or call the operation on these workers only"
        )
    if names != {me}:
        check_blocking("a group operation", "`await asyncio.to_thread(...)` for it")


class _Call(NamedTuple):
    """Arguments of an operation."""

    worker: Worker
    names: set[str]
    leader: str
    limit: WaitLimit
    timeout: float  # s; of the messages
    is_unset: bool  # the limit: the messages have one, the wait has none
    gather_to_leader: Callable[..., object]
    broadcast: Callable[..., object]

    @property
    def followers(self) -> set[str]:
        return self.names - {self.leader}

    def late(self, names: set[str]) -> GatheringTimeout:
        """Return the error for workers that did not come in time."""
        seconds = self.timeout if self.is_unset else self.limit.seconds
        return GatheringTimeout(f"Followers {sorted(names)} timed out in _all_gather after {seconds:.2f} seconds.")


def _run(call: _Call, purpose: str, value: object) -> dict[str, Any]:
    """Take part in an operation, and return the values of all workers."""
    gathering = gathering_of(call.worker)
    values: dict[str, Any] | None = None
    while values is None:
        op = gathering.begin(call.names, purpose)
        values = (_lead if call.leader == call.worker.info.name else _follow)(call, op, value)
    return values


# ---- the leader


def _lead(call: _Call, op: Operation, value: object) -> dict[str, Any]:
    """Collect the values and send them to the followers."""
    gathering, followers = gathering_of(call.worker), call.followers
    loss: GroupMemberLost | None = None

    def find_all() -> dict[str, Offer] | None:
        offers = gathering.offers(op)
        return offers if offers.keys() >= followers else None

    def missing() -> set[str]:
        return followers - gathering.offers(op).keys() or followers

    try:
        _wait_for_turn(call, op)
        broken = broken_connections(call.worker, followers)
        values, ids = {call.worker.info.name: value}, dict[str, OperationId]()
        while len(ids) < len(followers):
            offers = _wait_for(call, op, find_all, missing, followers, broken)
            ids = _ask(call, {name: offer.id for name, offer in sorted(offers.items())})
            values.update((name, offers[name].value) for name in ids)
        _send_values(call, ids, values)
        return values
    except GroupMemberLost as e:  # after another error, the followers go on waiting for this worker's next operation
        loss = e
        raise
    finally:
        gathering.finish(op)  # first: the handler of a later offer finds the loss itself
        if loss is not None:
            _end_offers(call.worker, {name: offer.id for name, offer in gathering.offers(op).items()}, loss)


def _ask(call: _Call, ids: dict[str, OperationId]) -> dict[str, OperationId]:
    """Ask the followers whether their operations wait; drop the offers of others.

    Returns:
        The ids, if all wait; otherwise those of some.
    """
    left = call.limit.left()
    timeout = call.timeout if left is None else max(left, _SHORTEST)
    results, errors = _call_followers(call.worker, ids, is_waiting, (_texts(ids),), timeout)
    late = {name for name, error in errors.items() if isinstance(error, TimeoutError)}
    if late:
        raise call.late(late)
    lost = {name for name, error in errors.items() if isinstance(error, WorkerLost)}
    if errors.keys() - lost:
        raise failure_of_calls(errors, timeout)
    over = {name: op_id for name, op_id in ids.items() if name in lost or not results[name]}
    gathering_of(call.worker).close(over)
    if over.keys() - lost and call.is_unset:  # these followers may not come again, and the wait has no limit
        raise call.late(over.keys() - lost)
    return {name: op_id for name, op_id in ids.items() if name not in over}


def _send_values(call: _Call, ids: dict[str, OperationId], values: dict[str, Any]) -> None:
    """Send the values of all workers to the followers."""
    gathering_of(call.worker).close(ids)
    try:
        results, errors = _call_followers(call.worker, ids, call.broadcast, (_texts(ids), values), call.timeout)
        over = [name for name, was_waiting in results.items() if was_waiting is False]
        errors.update({name: TelegradError(f"{name} has ended this operation; see its error.") for name in over})
        if errors:
            raise failure_of_calls(errors, call.timeout)
    except TelegradError as e:
        _end_offers(call.worker, ids, e)
        raise


def _call_followers(
    worker: Worker,
    ids: dict[str, OperationId],
    function: Callable[..., object],
    args: tuple[object, ...],
    timeout: float,
) -> tuple[dict[str, Any], dict[str, RuntimeError]]:
    """Call a function on followers. Return the results and the errors."""
    errors: dict[str, RuntimeError] = {}
    peers: dict[str, int] = {}
    for name in ids:
        try:
            peers[name] = worker.members.resolve(name).id
        except TelegradError as e:  # it has left, or is lost
            errors[name] = e
    limit = worker.calls.timeout(timeout)
    futures = call_many(worker.calls, list(peers.values()), function, args, {}, limit, FLAG_INTERNAL)
    results = {}
    for name, future in zip(peers, futures, strict=True):
        try:
            results[name] = future.wait()
        except RuntimeError as e:
            errors[name] = e
    return results, errors


def _end_offers(worker: Worker, ids: dict[str, OperationId], failure: TelegradError) -> None:
    """End the operations of followers with the leader's failure.

    Do not wait for replies.
    """
    gathering_of(worker).close(ids)
    notice, there = notice_of(failure), ids.keys() - worker.members.lost_names()
    for info in worker.members.infos():
        if info.name in there:
            _start(worker, info.id, receive_failure, (str(ids[info.name]), *notice))


def _texts(ids: dict[str, OperationId]) -> dict[str, str]:
    return {name: str(op_id) for name, op_id in ids.items()}


def _start(worker: Worker, peer: int, function: Callable[..., object], args: tuple[object, ...]) -> None:
    """Start a call without need for its result."""
    with suppress(RuntimeError):  # the worker closes, or the peer is lost
        worker.start_internal(peer, function, args, 0).add_done_callback(_read_result)


def _read_result(done: Future[object]) -> None:
    with suppress(RuntimeError):  # the peer is lost
        done.value()


# ---- a follower


def _follow(call: _Call, op: Operation, value: object) -> dict[str, Any] | None:
    """Offer the value to the leader and wait for all values.

    Returns:
        The values; None to begin again, because the leader's process was replaced before this worker has confirmed.
    """
    worker, leader, gathering = call.worker, call.leader, gathering_of(call.worker)
    failure: TelegradError | None = None
    is_complete = False

    def find() -> dict[str, Any] | None:
        if op.gathered_objects:
            return op.gathered_objects
        if op.failure is not None:
            raise op.failure
        if gathering.newest(op.id.key)[leader] == process:
            return None
        if op.is_confirmed:
            lost = worker.members.process_of(leader_id, process)
            raise LostWhileGathering({leader}, "another process has its name", lost)
        return {}

    try:
        _wait_for_turn(call, op)
        broken = broken_connections(worker, {leader})
        process, leader_id = gathering.newest(op.id.key)[leader], worker.members.resolve(leader).id
        notice = _offer(call, leader_id, (str(op.id), worker.info.name, value, call.names))
        if notice is not None and not op.gathered_objects:
            raise failure_in(notice)
        _wait_for(call, op, find, lambda: {leader}, {leader}, broken)
    except TelegradError as e:
        failure = e
    finally:
        is_complete = gathering.finish(op)
        # As in torch, the leader of an operation without a limit fails if the call of a follower is late.
        if not is_complete and op.failure is None and not call.is_unset:
            _withdraw_from(worker, leader, op)
    if failure is not None and not is_complete:
        raise failure
    return op.gathered_objects or None


def _offer(call: _Call, leader: int, args: tuple[object, ...]) -> Any:
    """Send the value to the leader, and return its reply.

    The request has no deadline, which the leader would drop when it is late: the leader waits for the value.

    Raises:
        RpcTimeout: There is no reply within the timeout.
    """
    left = call.limit.left()
    request = call.worker.start_internal(leader, call.gather_to_leader, args, 0)
    replied = threading.Event()
    request._on_done(lambda _: replied.set())
    if not wait_for(replied, call.timeout or None if left is None else left):
        request._mark_read()
        raise RpcTimeout(call.timeout, f"a group operation on {call.leader}")
    return request.wait()


def _withdraw_from(worker: Worker, leader: str, op: Operation) -> None:
    """Withdraw the offer.

    Otherwise the leader would keep the value, and ask for it.
    """
    info = worker.members.by_key.get(leader)
    if info is not None and info.id not in worker.members.lost:
        _start(worker, info.id, withdraw, (str(op.id), worker.info.name))


# ---- waits


def _wait_for_turn(call: _Call, op: Operation) -> None:
    gathering = gathering_of(call.worker)
    _wait_for(call, op, lambda: gathering.has_turn(op) or None, lambda: call.names - {call.worker.info.name}, set(), {})


def _wait_for(
    call: _Call,
    op: Operation,
    find: Callable[[], T | None],
    missing: Callable[[], set[str]],
    needed: set[str],
    broken: dict[int, str],
) -> T:
    """Wait until `find` returns a value.

    The leader needs all workers, a follower only the leader. The loss of a needed worker ends the wait. A follower must
    ignore the loss of another follower, which may have had its reply already. A connection to a live member that broke
    before the operation is no loss: the wait connects again.

    Raises:
        GatheringTimeout: The limit is over.
        WorkerLost: A needed worker is lost, or has left.
    """
    worker, signal = call.worker, op.proceed_signal
    is_connected = False  # without a link, the loss of a worker stays unnoticed
    with worker.members.on_change(signal.set):
        while True:
            signal.clear()
            left = call.limit.left()
            found = find()
            if found is not None:
                return found
            loss = find_loss(worker, gathering_of(worker).newest(op.id.key), needed, broken)
            if loss is not None:
                raise loss
            if left == 0.0:
                raise call.late(missing())
            if not is_connected:
                is_connected = True
                worker.ensure_connected(info.id for info in worker.members.infos() if info.name in needed)
            wait_for(signal, left)
