"""Graceful shutdown: when has everybody come, and when is all work of the group done? One `Drain` per worker, pure.

The live worker with the lowest id leads. Whoever shuts down tells it (`Ready`); once all live workers have, it asks for
everyone's counters in rounds. All work is done when nothing is pending anywhere and each worker has handled what each
other one sent it, in two rounds in a row with the very same counters. Given exact counters one such round would do: a
call that one report counts and another misses would have to be made up for by an earlier one, without end. The second
makes up for counters that are not read at one instant. Counts are compared per pair of live workers, so a worker that
died with calls in flight falsifies nothing. If the leader dies, the next one starts afresh.

There is no clock here: the glue paces rounds (`Pause`) and says when time is up (`expire`).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Counters(NamedTuple):
    """What one worker knows, read at one moment. Calls to oneself count like others."""

    sent: Mapping[int, int]  # worker -> calls sent to it
    handled: Mapping[int, int]  # worker -> calls from it whose handler has ended and whose reply has left
    pending: int  # handlers running or queued, own calls without a reply, and whatever else must end first


class Ready(NamedTuple):
    """Member -> leader: I have begun to shut down."""


class Ask(NamedTuple):
    """Leader -> member: your counters, please."""

    round: int


class Report(NamedTuple):
    round: int
    counters: Counters


class Finished(NamedTuple):
    """Leader -> member: all work is done. `lost`: who died on the way, and was left out; `left`: who went before."""

    lost: tuple[int, ...]
    left: tuple[int, ...] = ()


class Who(NamedTuple):
    """Member -> leader: my time is up; whom are we waiting for?"""


class Missing(NamedTuple):
    workers: tuple[int, ...]


Message = Ready | Ask | Report | Finished | Who | Missing


class Send(NamedTuple):
    to: int
    message: Message


class Count(NamedTuple):
    """Read the counters now, and call `counted` with both numbers."""

    asker: int
    round: int


class Pause(NamedTuple):
    """Work is still going on: call `resume` in a while."""


class Done(NamedTuple):
    """All work of the group is done; go. `lost`: who died on the way; `left`: who went before. All hear the same."""

    lost: tuple[int, ...]
    left: tuple[int, ...] = ()


class GaveUp(NamedTuple):
    """Time is up; `missing` did not come, or did not answer."""

    missing: tuple[int, ...]


Effect = Send | Count | Pause | Done | GaveUp


class Drain:
    """The shutdown of one worker. Make it with the group, since others may be ready first."""

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
        self._running = False  # a round is out
        self._time_is_up = False
        self._told: tuple[int, ...] = ()  # what a leader said was missing

    @property
    def leader(self) -> int:
        return min(self.live)

    def missing(self) -> tuple[int, ...]:
        """At the leader: who has not begun to shut down, or else has not answered this round."""
        return tuple(sorted(self.live - self._ready or self.live - self._reports.keys()))

    def arrive(self) -> list[Effect]:
        """This worker begins to shut down."""
        self.arrived = True
        self._ready.add(self.me)
        return self._advance() if self.leader == self.me else [Send(self.leader, Ready())]

    def counted(self, asker: int, round: int, counters: Counters) -> list[Effect]:
        """The answer to `Count`."""
        report = Report(round, counters)
        if asker == self.me:
            return self.handle(asker, report)
        return [Send(asker, report)] if asker in self.live else []

    def resume(self) -> list[Effect]:
        """The answer to `Pause`."""
        return self._advance()

    def expire(self) -> list[Effect]:
        """Time is up. Twice, a little later, if the first call did not bring `GaveUp`: then the leader is silent."""
        if self.over is not None:
            return []
        if self.leader == self.me:
            missing = self.missing()
            others = sorted(self._ready & self.live - {self.me})  # it leaves, so they cannot ask it later
            return [*(Send(to, Missing(missing)) for to in others), *self._end(GaveUp(missing))]
        if self._time_is_up:
            return self._end(GaveUp(self._told or (self.leader,)))
        self._time_is_up = True
        return [Send(self.leader, Who())]

    def handle(self, sender: int, message: Message) -> list[Effect]:
        """A message from another worker's `Drain`."""
        if isinstance(message, (Ready, Ask)) and isinstance(self.over, Done):
            return [Send(sender, Finished(*self.over))]  # the leader died before it could tell everybody
        if isinstance(message, Ready):
            self._ready.add(sender)
            return self._advance()
        if isinstance(message, Ask):
            return [Count(sender, message.round)]
        if isinstance(message, Report):
            if self._running and message.round == self._round and sender in self.live:
                self._reports[sender] = message.counters
            return self._judge()
        if isinstance(message, Finished):
            # Whoever took me for the leader already has lost the one that told me.
            waiting = sorted(self._ready & self.live - {self.me, sender})
            return [*(Send(to, message) for to in waiting), *self._end(Done(*message))]
        if isinstance(message, Who):
            return [Send(sender, Missing(self.missing()))]
        self._told = message.workers
        return self._end(GaveUp(message.workers)) if self._time_is_up else []

    def peer_gone(self, worker: int, orderly: bool = False) -> list[Effect]:
        """`worker` died, or (orderly) left after its own shutdown. It is waited for no longer."""
        if worker not in self.live:
            return []
        led = self.leader == worker
        self.live.discard(worker)
        self._ready.discard(worker)
        self._reports.pop(worker, None)
        self._before = None
        (self.left if orderly else self.lost).append(worker)
        if led and self._time_is_up:
            if not orderly or self._told:
                return self._end(GaveUp(self._told or (worker,)))
            if self.leader == self.me:
                return self._end(GaveUp(self.missing()))
            return [Send(self.leader, Ready()), Send(self.leader, Who())]
        if self.leader != self.me:
            if not led or not self.arrived:
                return []
            return [Send(self.leader, Finished(*self.over) if isinstance(self.over, Done) else Ready())]
        return self._judge() if self._running else self._advance()

    # ---- the leader's part ----------------------------------------------------------------------------------------

    def _advance(self) -> list[Effect]:
        """Begins a round if it is time for one."""
        if self.over is not None or self._running or self.leader != self.me or not self.live <= self._ready:
            return []
        self._round += 1
        self._running = True
        self._reports = {}
        return [Count(self.me, self._round), *(Send(to, Ask(self._round)) for to in sorted(self.live - {self.me}))]

    def _judge(self) -> list[Effect]:
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
    """Nothing is pending, and each live worker has handled what each live worker sent it."""
    return not any(counters.pending for counters in reports.values()) and all(
        sender.sent.get(b, 0) == receiver.handled.get(a, 0)
        for a, sender in reports.items()
        for b, receiver in reports.items()
    )
