"""Handlers of the messages between workers that run an operation together."""

from typing import Any

from telegrad.protocols.membership import ordinal_of
from telegrad.rpc.gathering import Gathering, OperationId
from telegrad.rpc.gathering_failures import Notice, broken_connections, failure_in, find_loss, notice_of
from telegrad.worker import Worker
from telegrad.worker.calls.interceptors import internal
from telegrad.worker.scope import current

__all__ = ["gathering_of", "is_waiting", "receive_failure", "receive_offer", "receive_values", "withdraw"]


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


def receive_offer(
    worker: Worker, sequence_id: str, name: str, value: object, worker_names: set[str] | None
) -> Notice | None:
    """Run on the leader: add the offer of a follower.

    Returns:
        None; or a failure, if no operation waits and one could not succeed.
    """
    gathering = gathering_of(worker)
    names = set(worker_names or (info.name for info in worker.members.infos()))
    if gathering.collect(sequence_id, name, value, names):
        return None
    op_id = OperationId.parse(sequence_id)
    assert op_id is not None
    others = set(op_id.names) - {worker.info.name, name}
    loss = find_loss(worker, gathering.newest(op_id.key), others, broken_connections(worker, others))
    if loss is None:
        return None
    gathering.close({name: op_id})
    return notice_of(loss)


def receive_values(worker: Worker, sequence_ids: dict[str, str], values: dict[str, object]) -> bool:
    """Run on the followers: end an operation. Return whether it still waited."""
    return gathering_of(worker).proceed(sequence_ids[worker.info.name], values)


def withdraw(sequence_id: str, name: str) -> None:
    """Run on the leader: drop the offer of a follower that has given up."""
    op_id = OperationId.parse(sequence_id)
    if op_id is not None:
        _gathering_here().close({name: op_id})


def is_waiting(sequence_ids: dict[str, str]) -> bool:
    """Run on the followers: return whether an operation still waits.

    The ids are by follower.
    """
    gathering = _gathering_here()
    return gathering.confirm(sequence_ids[gathering.name])


def receive_failure(sequence_id: str, kind: str, text: str, facts: dict[str, Any]) -> None:
    """Run on the followers: end their operation."""
    _gathering_here().fail(sequence_id, failure_in((kind, text, facts)))


internal.update((withdraw, is_waiting, receive_failure))


def _gathering_here() -> Gathering:
    scope = current.get()
    assert scope is not None
    return gathering_of(scope.worker)
