"""Operations of all workers of a group together: gather, barrier, shutdown.

As in torch, the worker with the smallest name is the leader: it collects a value from each worker and sends all values
to each.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.futures import Future

from telegrad.errors import RpcTimeout, TelegradError, WorkerLost
from telegrad.protocols.membership import ordinal_of
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.rpc.gathering import AllGatherStates, Gathering, OperationId, ordinals_of, text_of
from telegrad.timeouts import nanoseconds
from telegrad.waits import wait_for
from telegrad.wire.ints import FLAG_INTERNAL
from telegrad.worker import Worker
from telegrad.worker.blocking import check_blocking
from telegrad.worker.calls.interceptors import internal
from telegrad.worker.calls.multicast import call_many
from telegrad.worker.scope import current

__all__ = ["AllGatherStates", "Gathering", "LeftAfterGathering", "LostWhileGathering", "gather", "gathering_of"]

_AGAIN = "again"  # instead of a failure: the leader begins again


class _Ended(TelegradError):
    """Required worker that will not take part."""


class LostWhileGathering(_Ended):
    """Required worker that died."""


class LeftWhileGathering(_Ended):
    """Required worker that left, for example after its own timeout."""


class GatheringTimeout(TelegradError, TimeoutError):
    """Values of some workers did not arrive in time."""


class LeftAfterGathering(TelegradError):
    """Loss of workers after all took part, but before all confirmed the result."""


def gathering_of(worker: Worker) -> Gathering:
    """Return the operations of a worker."""

    def known(names: tuple[str, ...]) -> tuple[int, ...]:
        latest = worker.membership.log.view.latest if worker.membership is not None else {}
        own = {worker.info.name: worker.incarnation}
        return tuple(ordinal_of(own.get(name) or latest.get(name, 0)) for name in names)

    found: Gathering | None = worker.attachments.get("gathering")
    if found is None:
        found = worker.attachments.setdefault("gathering", Gathering(worker.info.name, known))
    return found


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
    if timeout == UNSET_RPC_TIMEOUT:
        rpc_timeout, seconds = worker.calls.default_timeout / 1e9, None
    else:
        seconds = nanoseconds(timeout) / 1e9 or None
        rpc_timeout = seconds or 0.0
    limit, values = _WaitLimit(seconds), None
    while True:
        if leader == me:
            values = _lead(worker, purpose, value, names, limit, rpc_timeout, broadcast)
        else:
            values = _follow(worker, purpose, value, names, limit, rpc_timeout, gather_to_leader)
        if values is not None:
            return values


class _WaitLimit:
    """Limit of a wait in seconds; None for no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds: float = seconds or 0.0
        self._until = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Return the seconds that are left, None for no limit."""
        return None if self._until == math.inf else max(self._until - time.monotonic(), 0.0)


def _lead(
    worker: Worker,
    purpose: str,
    value: object,
    names: set[str],
    limit: _WaitLimit,
    timeout: float,
    broadcast: Callable[..., object],
) -> dict[str, Any] | None:
    """Collect the values and send them to the followers.

    Returns:
        The values; None to begin again, because a process was replaced.
    """
    gathering, me = gathering_of(worker), worker.info.name
    op, state, outdated = gathering.begin(names, purpose)
    try:
        newest = text_of(gathering.newest(op.key))
        for text, waiting in outdated:
            _notify_followers(worker, text, waiting - {me}, _AGAIN, newest, timeout)
        gathering.collect(str(op), me, value, names)
        try:
            if not _wait_for(worker, op, state, names, me, limit):
                state.is_running = False  # the next `begin` gives the workers that wait for it
                return None
        except _Ended as e:
            _notify_followers(worker, str(op), names - {me}, type(e).__name__, str(e), timeout)
            raise
        _send_to_followers(worker, names - {me}, (str(op), state.gathered_objects), broadcast, timeout)
        return state.gathered_objects
    finally:
        if state.is_running:
            gathering.finish(op)


def _give(
    worker: Worker, leader: str, gather_to_leader: Callable[..., object], args: Sequence[object], timeout: float
) -> Any:
    """Send the value to the leader, and return its reply.

    The request has no deadline, which the leader would drop when it is late: the leader waits for the value.

    Raises:
        RpcTimeout: There is no reply within the timeout.
    """
    limit = _WaitLimit(timeout or None)
    call = worker.start_internal(worker.members.resolve(leader).id, gather_to_leader, args, 0)
    replied = threading.Event()
    call._on_done(lambda _: replied.set())
    if not wait_for(replied, limit.left()):
        call._mark_read()
        raise RpcTimeout(timeout, f"a group operation on {leader}")
    return call.wait()


def _follow(
    worker: Worker,
    purpose: str,
    value: object,
    names: set[str],
    limit: _WaitLimit,
    timeout: float,
    gather_to_leader: Callable[..., object],
) -> dict[str, Any] | None:
    """Send the value to the leader and wait for all values. Return as `_lead` does."""
    gathering, me, leader = gathering_of(worker), worker.info.name, min(names)
    op, state, _ = gathering.begin(names, purpose)
    try:
        if state.failure is None:
            newest = _give(worker, leader, gather_to_leader, (str(op), me, value, names), timeout)
            if newest is not None and state.failure is None:
                gathering.receive_ordinals(op.key, ordinals_of(newest))
                return None
        return state.gathered_objects if _wait_for(worker, op, state, names, leader, limit) else None
    finally:
        gathering.finish(op)


def _check_caller(me: str, names: set[str]) -> None:
    """Raise an error if this worker takes no part, or its thread must not wait.

    Before anything is sent: the other workers would count an operation that this worker has not made.
    """
    if me not in names:
        raise ValueError(
            f"worker {me} called an operation of the workers {', '.join(sorted(names))}, of which it is none:"
            " name it among the workers, or call the operation on these workers only"
        )
    if names != {me}:
        check_blocking("a group operation", "`await asyncio.to_thread(...)` for it")


def broadcast_to(worker: Worker, value: object, source: str, names: set[str], timeout: float) -> Any:
    """Return the value of one worker on all of them.

    The source counts its values per follower, so a follower that comes back does not concern the others.

    Args:
        worker: this worker.
        value: the value, on the source.
        source: name of the source.
        names: the workers that take part.
        timeout: seconds; 0 is no limit.

    Raises:
        ValueError: this worker is not one of those that take part.
        TelegradError: the source did not send the value in time, left, or is lost; or the thread runs the coroutines of
            a worker, and nothing has been done.
    """
    gathering, me = gathering_of(worker), worker.info.name
    _check_caller(me, names)
    purpose = f"broadcast of {source} to {','.join(sorted(names))}"
    if source == me:
        followers = names - {me}
        while followers:
            ids = {name: gathering.next_id((me, name), purpose) for name in followers}
            texts = {name: str(op) for name, op in ids.items()}
            replies = _send_to_followers(worker, followers, (texts, {source: value}), _receive_broadcast, timeout)
            followers = {name for name, newest in replies.items() if newest is not None}
            for name in followers:  # new processes, of which this worker has not known
                gathering.receive_ordinals(ids[name].key, ordinals_of(replies[name]))
        return value
    limit = _WaitLimit(timeout or None)
    while True:
        op, state, _ = gathering.begin((source, me), purpose)
        try:
            if _wait_for(worker, op, state, {source}, source, limit):
                return state.gathered_objects[source]
        finally:
            gathering.finish(op)


def _send_to_followers(
    worker: Worker, names: set[str], arguments: tuple[object, ...], broadcast: Callable[..., object], timeout: float
) -> dict[str, Any]:
    """Call a function on followers and return the results."""
    followers = sorted(names)
    futures = call_many(
        worker.calls,
        [worker.members.resolve(name).id for name in followers],
        broadcast,
        arguments,
        {},
        worker.calls.timeout(timeout),
        FLAG_INTERNAL,
    )
    errors, results = [], {}
    for name, future in zip(followers, futures, strict=True):
        try:
            results[name] = future.wait()
        except RuntimeError as e:
            errors.append((name, e))
    if errors:
        left = all(isinstance(error, WorkerLost) and error.left for _, error in errors)
        is_late = any(isinstance(error, TimeoutError) for _, error in errors)
        kind = LeftAfterGathering if left else GatheringTimeout if is_late else TelegradError
        what = "timed out in _all_gather" + (f" after {timeout:.2f} seconds" if is_late else ", or failed")
        raise kind(f"Followers {[name for name, _ in errors]} {what}. The first exception is {errors[0][1]}")
    return results


def _wait_for(
    worker: Worker, op: OperationId, state: AllGatherStates, names: set[str], leader: str, limit: _WaitLimit
) -> bool:
    """Wait until all values have arrived.

    The leader needs all workers, a follower only the leader. The loss of a needed worker ends the wait. A follower must
    ignore the loss of another follower, which may have had its reply already. A connection to a live member that broke
    before the wait is no loss: the wait connects again.

    Returns:
        False if the operation has to begin again, with a newer process of a worker: the leader says so, and no worker
        has the result; or only a value of the leader is awaited, which has come back.
    """
    members, signal, me = worker.members, state.proceed_signal, worker.info.name
    needed = names if leader == me else {leader}
    broken = _broken_connections(worker, needed)
    is_connected = False  # without a link, the loss of a worker stays unnoticed
    with members.on_change(signal.set):
        while True:
            signal.clear()
            left = limit.left()
            if set(state.gathered_objects) >= names:
                return True
            if state.failure is not None:
                raise state.failure
            newest = dict(zip(op.names, gathering_of(worker).newest(op.key), strict=True))
            replaced = {name for name, old in zip(op.names, op.ordinals, strict=True) if newest[name] > old} & needed
            if state.is_outdated or (replaced and (leader == me or names == {leader})):
                return False
            _check_losses(worker, op, needed, replaced, broken)
            if left == 0.0:
                missing = sorted(names - set(state.gathered_objects)) if leader == me else [leader]
                raise GatheringTimeout(
                    f"Followers {missing} timed out in _all_gather after {limit.seconds:.2f} seconds."
                )
            if not is_connected:
                is_connected = True
                worker.ensure_connected(info.id for info in members.infos() if info.name in needed - {me})
            wait_for(signal, left)


def _broken_connections(worker: Worker, names: set[str]) -> dict[int, str]:
    """Return the losses, by id, of live members: a new connection ends them."""
    members = worker.members
    losses = [(peer, why) for peer, why in list(members.lost.items()) if members.name_of(peer) in names]
    return {peer: why for peer, why in losses if peer not in members.departed and _is_member(worker, peer)}


def _is_member(worker: Worker, peer: int) -> bool:
    """Return whether the newest known process of a worker is in the group, by the log."""
    member, membership = worker.members.get(peer), worker.membership
    return member is not None and membership is not None and membership.log.view.has(peer, member.incarnation)


def _check_losses(
    worker: Worker, op: OperationId, needed: set[str], replaced: set[str], broken: dict[int, str]
) -> None:
    """Raise an error if the process of a needed worker is gone.

    A loss is of the newest process in the group's log that this worker has read. The id may have a newer one. The
    losses in `broken` do not count, unless the group loses the member; a failed attempt to connect is another loss.
    """
    members = worker.members
    processes = dict(zip(op.names, op.ordinals, strict=True))
    ended = members.lost_processes()
    for peer, why in broken.items():
        if members.lost.get(peer) is why and _is_member(worker, peer):
            ended.pop(members.name_of(peer), None)
    lost = {name for name in needed & ended.keys() if ordinal_of(ended[name]) >= processes[name]}
    left = members.departed_names() & lost
    if left:
        raise LeftWhileGathering(
            f"workers {', '.join(sorted(left))} left before the whole group had gathered; see their errors"
        )
    if lost | replaced:
        raise LostWhileGathering(f"workers {', '.join(sorted(lost | replaced))} were lost while the group gathered")


def _notify_followers(worker: Worker, sequence_id: str, names: set[str], kind: str, text: str, timeout: float) -> None:
    """Send the leader's failure to the followers without waiting for replies."""
    there = names - worker.members.lost_names()
    for info in worker.members.infos():
        if info.name in there:
            what = (sequence_id, kind, text)
            worker.start_internal(info.id, _receive_failure, what, timeout).add_done_callback(_read_result)


def _read_result(done: Future[object]) -> None:
    with suppress(RuntimeError):  # the follower is lost itself
        done.value()


def _receive_failure(sequence_id: str, kind: str, text: str) -> None:
    """Run on the followers: end their wait, or let them begin again."""
    gathering = _gathering_here()
    if kind == _AGAIN:
        gathering.begin_again(sequence_id, ordinals_of(text))
        return
    failures = {each.__name__: each for each in (LostWhileGathering, LeftWhileGathering)}
    gathering.fail(sequence_id, failures[kind](text))


def _receive_broadcast(sequence_ids: dict[str, str], values: dict[str, object]) -> str | None:
    """Run on the followers of a broadcast: store the value. The ids are by follower."""
    gathering = _gathering_here()
    return gathering.proceed(sequence_ids[gathering.name], values)


internal.update((_receive_failure, _receive_broadcast))


def _gathering_here() -> Gathering:
    scope = current.get()
    assert scope is not None
    return gathering_of(scope.worker)
