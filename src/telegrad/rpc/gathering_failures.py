"""Errors of operations of several workers, and the losses that cause them."""

from typing import Any

from telegrad.errors import TelegradError, WorkerLost, rebuild
from telegrad.protocols.membership import ordinal_of
from telegrad.worker import Worker

__all__ = [
    "GatheringTimeout",
    "GroupMemberLost",
    "LeftAfterGathering",
    "LeftWhileGathering",
    "LostWhileGathering",
    "Notice",
    "broken_connections",
    "failure_in",
    "failure_of_calls",
    "find_loss",
    "notice_of",
]

Notice = tuple[str, str, dict[str, Any]]
"""Failure of the leader in a message: class, text, attributes."""


class GroupMemberLost(WorkerLost):
    """Required worker that will not take part.

    Args:
        names: All such workers.
        why, incarnation: Those of the first one by name.
    """

    text = "workers {} are lost"

    def __init__(self, names: set[str], why: str, incarnation: int) -> None:
        name = min(names)
        super().__init__(name, why, incarnation)
        self.args: tuple[Any, ...] = (f"{self.text.format(', '.join(sorted(names)))} (worker {name}: {why})",)


class LostWhileGathering(GroupMemberLost):
    """Required worker that died."""

    text = "workers {} were lost while the group gathered"


class LeftWhileGathering(GroupMemberLost):
    """Required worker that left, for example after its own timeout."""

    text = "workers {} left before the whole group had gathered; see their errors"


class GatheringTimeout(TelegradError, TimeoutError):
    """Values of some workers did not arrive in time."""


class LeftAfterGathering(TelegradError):
    """Loss of workers after all took part, but before all confirmed the result."""


_FAILURES: dict[str, type[TelegradError]] = {
    each.__name__: each for each in (LostWhileGathering, LeftWhileGathering, GatheringTimeout)
}


# ---- failures in messages


def notice_of(failure: TelegradError) -> Notice:
    """Return a failure for a message."""
    names = ("name", "why", "incarnation") if isinstance(failure, GroupMemberLost) else ()
    facts = {name: getattr(failure, name) for name in names}
    return type(failure).__name__, str(failure), facts


def failure_in(notice: Notice) -> TelegradError:
    """Return the failure in a message."""
    kind, text, facts = notice
    failure = rebuild(_FAILURES.get(kind, TelegradError), (text,), facts)
    assert isinstance(failure, TelegradError)
    return failure


def failure_of_calls(errors: dict[str, RuntimeError], timeout: float) -> TelegradError:
    """Return the error of a leader for its failed calls of followers."""
    left = all(isinstance(error, WorkerLost) and error.left for error in errors.values())
    is_late = any(isinstance(error, TimeoutError) for error in errors.values())
    kind = LeftAfterGathering if left else GatheringTimeout if is_late else TelegradError
    what = "timed out in _all_gather" + (f" after {timeout:.2f} seconds" if is_late else ", or failed")
    names = sorted(errors)
    return kind(f"Followers {names} {what}. The first exception is {errors[names[0]]}")


# ---- losses


def broken_connections(worker: Worker, names: set[str]) -> dict[int, str]:
    """Return the losses, by id, of live members: a new connection ends them."""
    members = worker.members
    losses = [(peer, why) for peer, why in list(members.lost.items()) if members.name_of(peer) in names]
    return {peer: why for peer, why in losses if peer not in members.departed and _is_member(worker, peer)}


def _is_member(worker: Worker, peer: int) -> bool:
    """Return whether the newest known process of a worker is in the group, by the log."""
    member, membership = worker.members.get(peer), worker.membership
    return member is not None and membership is not None and membership.log.view.has(peer, member.incarnation)


def find_loss(
    worker: Worker, newest: dict[str, int], needed: set[str], broken: dict[int, str]
) -> GroupMemberLost | None:
    """Return an error if the process of a needed worker is gone.

    Args:
        worker: This worker.
        newest: Numbers of the newest processes, by name. A loss is of the newest process in the group's log that this
            worker has read; a newer one may be known by its offer only.
        needed: Names of the needed workers.
        broken: Losses that do not count, unless the group loses the member. A failed attempt to connect is another one.
    """
    members = worker.members
    ended = members.lost_processes()
    for peer, why in broken.items():
        if members.lost.get(peer) is why and _is_member(worker, peer):
            ended.pop(members.name_of(peer), None)
    lost = {name for name in needed & ended.keys() if ordinal_of(ended[name]) >= newest[name]}
    if not lost:
        return None
    left = members.departed_names() & lost
    kind, name = (LeftWhileGathering, min(left)) if left else (LostWhileGathering, min(lost))
    reasons = [why for peer, why in list(members.lost.items()) if members.name_of(peer) == name]
    return kind(left or lost, reasons[-1] if reasons else "it is gone", ended[name])
