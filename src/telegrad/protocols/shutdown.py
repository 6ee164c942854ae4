"""Graceful shutdown: one pure `Drain` per worker detects the end of all work.

The live worker with the lowest id leads. A worker that shuts down notifies the leader (`Ready`). Once all live workers
have done so, the leader collects the counters of all workers in rounds. A round is balanced if no worker has pending
work and all calls between workers are handled. Two consecutive balanced rounds with equal counters end the shutdown.

With exact counters one balanced round is enough: a call that one report counts and another misses would need an earlier
unbalanced call, and so on without end. The second round covers counters that are not read at one instant. Counts are
compared per pair of live workers, so calls in flight from a dead worker do not matter. If the leader dies, the next
leader starts from the beginning.

The machine has no clock: the caller paces the rounds (`Pause`) and reports the deadline (`expire`).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Counters(NamedTuple):
    """Counters of one worker, read at one moment.

    Calls of a worker to itself count like others.
    """

    sent: Mapping[int, int]  # worker -> calls sent to it
    handled: Mapping[int, int]  # worker -> calls from it with the handler ended and the reply sent
    pending: int  # handlers running or queued, own calls without a reply, and other work that must end first


class Ready(NamedTuple):
    """Member -> leader: the sender has begun to shut down."""


class Ask(NamedTuple):
    """Leader -> member: request for the member's counters."""

    round: int


class Report(NamedTuple):
    round: int
    counters: Counters


class Finished(NamedTuple):
    """Leader -> member: all work has ended.

    Args:
        lost: Workers that died during the shutdown, and were left out.
        left: Workers that left before.
    """

    lost: tuple[int, ...]
    left: tuple[int, ...] = ()


class MissingQuery(NamedTuple):
    """Member -> leader: the deadline has passed; request for the missing workers."""


class Missing(NamedTuple):
    workers: tuple[int, ...]


Message = Ready | Ask | Report | Finished | MissingQuery | Missing


class Send(NamedTuple):
    to: int
    message: Message


class Count(NamedTuple):
    """Read the counters now and call `counted` with both numbers."""

    asker: int
    round: int


class Pause(NamedTuple):
    """Work is still in progress: call `resume` after a delay."""


class Done(NamedTuple):
    """Completion of the group's work: the worker may exit.

    All workers get the same lists.

    Args:
        lost: Workers that died during the shutdown.
        left: Workers that left before.
    """

    lost: tuple[int, ...]
    left: tuple[int, ...] = ()


class GaveUp(NamedTuple):
    """The deadline has passed; `missing` did not begin to shut down, or did not reply."""

    missing: tuple[int, ...]


Effect = Send | Count | Pause | Done | GaveUp


class Drain:
    """Shutdown state of one worker.

    Created when the worker joins, as other workers may be ready first.
    """

    def __init__(self, me: int, members: Iterable[int]) -> None:
        self.me = me
        self.live: set[int] = {me, *members}
        self.lost: list[int] = []
        self.left: list[int] = []
        self.arrived: bool = False
        self.over: Done | GaveUp | None = None
        self._ready: set[int] = set()
        self._round = 0
        self._reports: dict[int, Counters] = {}
        self._before: dict[int, Counters] | None = None  # the last round's reports, if they were balanced
        self._running = False  # a round is in progress
        self._time_is_up = False
        self._reported_missing: tuple[int, ...] = ()  # missing workers as reported by a leader

    @property
    def leader(self) -> int:
        return min(self.live)

    def missing(self) -> tuple[int, ...]:
        """Return, at the leader, the workers that it waits for.

        These are the workers that have not begun to shut down or, if all have, those that have not replied this round.
        """
        return tuple(sorted(self.live - self._ready or self.live - self._reports.keys()))

    def arrive(self) -> list[Effect]:
        """Begin the shutdown of this worker."""
        self.arrived = True
        self._ready.add(self.me)
        return self._advance() if self.leader == self.me else [Send(self.leader, Ready())]

    def counted(self, asker: int, round: int, counters: Counters) -> list[Effect]:
        """Pass the counters that `Count` asked for."""
        report = Report(round, counters)
        if asker == self.me:
            return self.handle(asker, report)
        return [Send(asker, report)] if asker in self.live else []

    def resume(self) -> list[Effect]:
        """Continue after `Pause`."""
        return self._advance()

    def expire(self) -> list[Effect]:
        """Record that the deadline has passed.

        If the first call does not lead to `GaveUp`, call again after a grace period: the leader does not reply.
        """
        if self.over is not None:
            return []
        if self.leader == self.me:
            missing = self.missing()
            others = sorted(self._ready & self.live - {self.me})  # the leader exits, so they cannot ask it later
            return [*(Send(to, Missing(missing)) for to in others), *self._end(GaveUp(missing))]
        if self._time_is_up:
            return self._end(GaveUp(self._reported_missing or (self.leader,)))
        self._time_is_up = True
        return [Send(self.leader, MissingQuery())]

    def handle(self, sender: int, message: Message) -> list[Effect]:
        """Process a message from another worker's `Drain`."""
        if isinstance(message, (Ready, Ask)) and isinstance(self.over, Done):
            return [Send(sender, Finished(*self.over))]  # the leader died before it notified all workers
        if isinstance(message, Ready):
            self._ready.add(sender)
            return self._advance()
        if isinstance(message, Ask):
            return [Count(sender, message.round)]
        if isinstance(message, Report):
            if self._running and message.round == self._round and sender in self.live:
                self._reports[sender] = message.counters
            return self._check_round()
        if isinstance(message, Finished):
            # Workers that treat this worker as the leader have lost the sender already: forward the message.
            waiting = sorted(self._ready & self.live - {self.me, sender})
            return [*(Send(to, message) for to in waiting), *self._end(Done(*message))]
        if isinstance(message, MissingQuery):
            return [Send(sender, Missing(self.missing()))]
        self._reported_missing = message.workers
        return self._end(GaveUp(message.workers)) if self._time_is_up else []

    def peer_gone(self, worker: int, orderly: bool = False) -> list[Effect]:
        """Stop waiting for `worker`, which died or (orderly) left after its own shutdown."""
        if worker not in self.live:
            return []
        led = self.leader == worker
        self.live.discard(worker)
        self._ready.discard(worker)
        self._reports.pop(worker, None)
        self._before = None
        (self.left if orderly else self.lost).append(worker)
        if led and self._time_is_up:
            if not orderly or self._reported_missing:
                return self._end(GaveUp(self._reported_missing or (worker,)))
            if self.leader == self.me:
                return self._end(GaveUp(self.missing()))
            return [Send(self.leader, Ready()), Send(self.leader, MissingQuery())]
        if self.leader != self.me:
            if not led or not self.arrived:
                return []
            return [Send(self.leader, Finished(*self.over) if isinstance(self.over, Done) else Ready())]
        return self._check_round() if self._running else self._advance()

    def peer_back(self, worker: int) -> list[Effect]:
        """Wait again for a worker that was lost or left, or for its new process."""
        gone = self.lost if worker in self.lost else self.left
        if worker not in gone or self.over is not None:
            return []
        led = self.leader == self.me
        gone.remove(worker)
        self.live.add(worker)
        self._reports.pop(worker, None)
        self._before = None
        if led:
            self._running = False  # the round has not asked this worker
        if self.leader == self.me:
            return self._advance()
        return [Send(self.leader, Ready())] if self.arrived and self.leader == worker else []

    # ---- the leader's part ----------------------------------------------------------------------------------------

    def _advance(self) -> list[Effect]:
        """Begin a round if all live workers are ready and none is in progress."""
        if self.over is not None or self._running or self.leader != self.me or not self.live <= self._ready:
            return []
        self._round += 1
        self._running = True
        self._reports = {}
        return [Count(self.me, self._round), *(Send(to, Ask(self._round)) for to in sorted(self.live - {self.me}))]

    def _check_round(self) -> list[Effect]:
        if self.over is not None or not self._running or self._reports.keys() != self.live:
            return []
        self._running = False
        if not balanced(self._reports):
            self._before = None
            return [Pause()]
        if self._reports != self._before:
            self._before = self._reports
            return self._advance()
        done = Done(tuple(self.lost), tuple(self.left))
        return [*(Send(to, Finished(*done)) for to in sorted(self.live - {self.me})), *self._end(done)]

    def _end(self, how: Done | GaveUp) -> list[Effect]:
        if self.over is not None:
            return []
        self.over = how
        return [how]


def balanced(reports: Mapping[int, Counters]) -> bool:
    """Return whether no work is pending and all calls of live workers are handled."""
    return not any(counters.pending for counters in reports.values()) and all(
        sender.sent.get(b, 0) == receiver.handled.get(a, 0)
        for a, sender in reports.items()
        for b, receiver in reports.items()
    )
