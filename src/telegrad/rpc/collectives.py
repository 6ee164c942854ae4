"""Operations of all workers of a group together: gather, barrier, shutdown.

As in torch, the worker with the smallest name is the leader: it collects a value from each worker and sends all values
to each.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from telegrad.errors import TelegradError, WorkerLost
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.waits import wait_for
from telegrad.wire import Flag
from telegrad.worker import Worker
from telegrad.worker.calls.multicast import call_many
from telegrad.worker.scope import current

__all__ = ["AllGatherStates", "Gathering", "LeftAfterGathering", "LostWhileGathering", "gather", "gathering_of"]


class _Ended(TelegradError):
    """Required worker that will not take part."""


class LostWhileGathering(_Ended):
    """Required worker that died."""


class LeftWhileGathering(_Ended):
    """Required worker that left, for example after its own timeout."""


class LeftAfterGathering(TelegradError):
    """Loss of workers after all took part, but before all confirmed the result."""


class AllGatherStates:
    """State of one gathering in progress, on one worker.

    Example::

        state = rpc.AllGatherStates()
        assert not state.proceed_signal.is_set()
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, object] = {}
        self.proceed_signal: threading.Event = threading.Event()
        self.failure: TelegradError | None = None  # the error with which the leader ended it


class Gathering:
    """Gatherings of one worker, by sequence id."""

    def __init__(self) -> None:
        self.lock: threading.RLock = threading.RLock()
        self.sequences: dict[str, int] = {}
        self.states: dict[str, AllGatherStates] = {}

    def next_id(self, names: set[str], purpose: str = "") -> str:
        """Return the next id for a set of workers and a purpose; the same on all of them."""
        joined = purpose + "".join(sorted(names))
        with self.lock:
            number = self.sequences.get(joined, 0)
            self.sequences[joined] = number + 1
        return joined + str(number)

    def state(self, sequence_id: str) -> AllGatherStates:
        with self.lock:
            return self.states.setdefault(sequence_id, AllGatherStates())

    def collect(self, sequence_id: str, name: str, value: object, names: set[str]) -> None:
        """Add the value of a worker, on the leader."""
        with self.lock:
            state = self.state(sequence_id)
            if name in state.gathered_objects:
                raise TelegradError(f"{name} reported intent sequence id {sequence_id} twice. ")
            state.gathered_objects[name] = value
            if set(state.gathered_objects) == names:
                state.proceed_signal.set()

    def proceed(self, sequence_id: str, values: dict[str, object]) -> None:
        """Store the values of all workers and end the wait, on a follower."""
        state = self.state(sequence_id)
        if state.proceed_signal.is_set():
            raise TelegradError(f"Termination signal sequence id {sequence_id} got set twice.")
        state.gathered_objects = values
        state.proceed_signal.set()

    def fail(self, sequence_id: str, failure: TelegradError) -> None:
        """End the wait with the leader's failure, on a follower."""
        state = self.state(sequence_id)
        state.failure = failure
        state.proceed_signal.set()

    def finish(self, sequence_id: str) -> dict[str, Any]:
        with self.lock:
            return self.states.pop(sequence_id).gathered_objects


def gathering_of(worker: Worker) -> Gathering:
    """Return the gatherings of a worker."""
    found: Gathering = worker.attachments.setdefault("gathering", Gathering())
    return found


def gather(
    worker: Worker,
    value: object,
    names: set[str],
    timeout: float,
    gather_to_leader: Callable[..., None],
    broadcast: Callable[..., None],
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
        TelegradError: some workers did not take part in time, or are lost.
    """
    gathering = gathering_of(worker)
    leader = min(names)
    sequence_id = gathering.next_id(names, purpose)
    if timeout == UNSET_RPC_TIMEOUT:
        rpc_timeout, patience = worker.calls.default_timeout / 1e9, None
    else:
        rpc_timeout, patience = timeout, timeout or None
    me = worker.info.name
    if leader == me:
        gathering.collect(sequence_id, me, value, names)
    else:
        worker.start_internal(
            worker.members.resolve(leader).id, gather_to_leader, (sequence_id, me, value, names), rpc_timeout
        ).wait()
    state = gathering.state(sequence_id)
    try:
        _wait_for(worker, state, names, leader, patience)
    except _Ended as e:
        if leader == me:
            _tell_followers(worker, sequence_id, names - {me}, e, rpc_timeout)
        raise
    if leader == me:
        _send_to_followers(worker, sequence_id, state.gathered_objects, names, broadcast, rpc_timeout)
    return gathering.finish(sequence_id)


def broadcast_to(
    worker: Worker, value: object, source: str, names: set[str], timeout: float, broadcast: Callable[..., None]
) -> Any:
    """Return the value of one worker on all of them.

    Args:
        worker: this worker.
        value: the value, on the source.
        source: name of the source.
        names: the workers that take part.
        timeout: seconds; 0 is no limit.
        broadcast: runs on each follower, with the value.

    Raises:
        TelegradError: the source did not send the value in time, left, or is lost.
    """
    gathering = gathering_of(worker)
    sequence_id = gathering.next_id(names, f"broadcast of {source} ")
    state = gathering.state(sequence_id)
    try:
        if source == worker.info.name:
            _send_to_followers(worker, sequence_id, {source: value}, names, broadcast, timeout)
            return value
        _wait_for(worker, state, {source}, source, timeout or None)
        return state.gathered_objects[source]
    finally:
        gathering.finish(sequence_id)


def _send_to_followers(
    worker: Worker,
    sequence_id: str,
    values: dict[str, object],
    names: set[str],
    broadcast: Callable[..., None],
    timeout: float,
) -> None:
    followers = sorted(names - {worker.info.name})
    told = call_many(
        worker.calls,
        [worker.members.resolve(name).id for name in followers],
        broadcast,
        (sequence_id, values),
        {},
        worker.calls.timeout(timeout),
        int(Flag.INTERNAL),
    )
    errors = []
    for name, future in zip(followers, told, strict=True):
        try:
            future.wait()
        except RuntimeError as e:
            errors.append((name, e))
    if errors:
        left = all(isinstance(error, WorkerLost) and error.left for _, error in errors)
        kind = LeftAfterGathering if left else TelegradError
        raise kind(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after {timeout:.2f} seconds."
            f" The first exception is {errors[0][1]}"
        )


def _wait_for(worker: Worker, state: AllGatherStates, names: set[str], leader: str, patience: float | None) -> None:
    """Wait until all values have arrived.

    The leader needs all workers, a follower only the leader. The loss of a needed worker ends the wait. A follower must
    ignore the loss of another follower, which may have had its reply already.
    """
    needed = names if leader == worker.info.name else {leader}

    def look() -> None:
        if worker.members.lost_names() & needed:
            state.proceed_signal.set()

    with worker.members.on_change(look):
        look()
        if not state.proceed_signal.is_set():  # without a link, the loss of a worker stays unnoticed
            worker.ensure_connected(
                info.id for info in worker.members.infos() if info.name in needed - {worker.info.name}
            )
        arrived = wait_for(state.proceed_signal, patience)
    if set(state.gathered_objects) >= names:
        return
    if state.failure is not None:
        raise state.failure
    lost = worker.members.lost_names() & needed
    left = worker.members.departed_names() & lost
    if left:
        raise LeftWhileGathering(
            f"workers {', '.join(sorted(left))} left before the whole group had gathered; see their errors"
        )
    if lost:
        raise LostWhileGathering(f"workers {', '.join(sorted(lost))} were lost while the group gathered")
    if not arrived:
        missing = sorted(names - set(state.gathered_objects)) if leader == worker.info.name else [leader]
        raise TelegradError(f"Followers {missing} timed out in _all_gather after {patience or 0:.2f} seconds.")


def _tell_followers(worker: Worker, sequence_id: str, names: set[str], failure: "_Ended", timeout: float) -> None:
    """Send the leader's failure to the followers without waiting for replies."""
    there = names - worker.members.lost_names()
    for info in worker.members.infos():
        if info.name in there:
            what = (sequence_id, type(failure).__name__, str(failure))
            worker.start_internal(info.id, _hear_of_failure, what, timeout).add_done_callback(_read_result)


def _read_result(told: Any) -> None:
    with suppress(RuntimeError):  # the follower is lost itself
        told.value()


def _hear_of_failure(sequence_id: str, kind: str, text: str) -> None:
    """Run on the followers: end their wait with the leader's failure."""
    scope = current.get()
    assert scope is not None
    failures = {each.__name__: each for each in (LostWhileGathering, LeftWhileGathering)}
    gathering_of(scope.worker).fail(sequence_id, failures[kind](text))
