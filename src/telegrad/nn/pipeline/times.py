"""Times of the passes of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from telegrad.nn.pipeline.schedule import Order, Pass, bubble, makespan

__all__ = ["PassTime", "StepTimes"]


class PassTime(NamedTuple):
    """Pass with its begin and end in seconds, of the monotonic clock of its host."""

    of: Pass
    begin: float
    end: float


@dataclass(frozen=True)
class StepTimes:
    """Times of one step: how long the stages worked, and how long they waited.

    Attributes:
        elapsed: seconds of the step at its caller, messages included.
        stages: the passes of each stage, in the order in which it ran them: ``of`` (shown as "F0", "B0", ...), and
            ``begin`` and ``end`` in seconds of the monotonic clock of the stage's host. They contain the module and
            torch's backward pass, not the messages.

    Example::

        layers = [("worker1", torch.nn.Linear, (8, 8)), ("worker2", torch.nn.Linear, (8, 1))]
        pipe = Pipeline(layers, loss_fn=torch.nn.functional.mse_loss, micro_batches=4)
        pipe.step(torch.ones(16, 8), target=torch.zeros(16, 1))
        times = pipe.times
        print(f"bubble {times.bubble:.0%}, in theory {times.ideal_bubble:.0%}")  # the theory: 20%
        print([str(each.of) for each in times.stages[1]])  # ['F0', 'B0', 'F1', 'B1', 'F2', 'B2', 'F3', 'B3']
    """

    elapsed: float
    stages: Sequence[Sequence[PassTime]]

    @property
    def bubble(self) -> float:
        """Part of the step in which a stage waits, on average: from 0 to 1."""
        busy = sum(one.end - one.begin for stage in self.stages for one in stage)
        return 1.0 - busy / (len(self.stages) * self.elapsed) if self.elapsed else 0.0

    @property
    def ideal_bubble(self) -> float:
        """Bubble of equal stages if messages took no time: (S - 1) / (M + S - 1)."""
        return bubble(len(self.stages), len({one.of.micro_batch for one in self.stages[0]}))

    @property
    def balanced_bubble(self) -> float:
        """Bubble of these passes, with their measured times, if messages took no time.

        It is larger than `ideal_bubble` if one stage takes longer than the others.
        """
        orders: list[Order] = [[one.of for one in stage] for stage in self.stages]
        durations = {(n, one.of): one.end - one.begin for n, stage in enumerate(self.stages) for one in stage}
        span = makespan(orders, lambda stage, one: durations[stage, one])
        return 1.0 - sum(durations.values()) / (len(self.stages) * span) if span else 0.0
