"""Schedules: the order in which each stage of a pipeline runs its passes.

Pure functions, without workers and without torch.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

__all__ = [
    "SCHEDULES",
    "Order",
    "Pass",
    "PassKind",
    "Schedule",
    "bubble",
    "eager_one_forward_one_backward",
    "forward_only",
    "gpipe",
    "makespan",
    "one_forward_one_backward",
]


class PassKind(IntEnum):
    """Direction of a pass."""

    FORWARD = 0
    BACKWARD = 1


class Pass(NamedTuple):
    """Forward or backward pass of one micro-batch through one stage."""

    kind: PassKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{'FB'[self.kind]}{self.micro_batch}"


Order: TypeAlias = list[Pass]
"""Passes of one stage, in the order in which it runs them."""

Schedule: TypeAlias = Callable[[int, int], list[Order]]
"""Function of the numbers of stages and micro-batches that returns the order of each stage."""


def gpipe(stages: int, micro_batches: int) -> list[Order]:
    """Return the orders of GPipe: all forward passes, then all backward passes.

    Every stage keeps the activations of all micro-batches. The backward passes run in the order of the forward passes,
    so that gradients are summed in the same order under every schedule. Source: Huang et al., "GPipe: Efficient
    Training of Giant Neural Networks using Pipeline Parallelism", 2019.
    """
    passes = [Pass(kind, i) for kind in PassKind for i in range(micro_batches)]
    return [list(passes) for _ in range(stages)]


def one_forward_one_backward(stages: int, micro_batches: int) -> list[Order]:
    """Return the orders of 1F1B: one backward and one forward pass in turn.

    Stage s, counted from 0, keeps the activations of at most ``stages - s`` micro-batches. This is the schedule with a
    flush after each batch, so all passes use the same parameters. Source: Narayanan et al., "PipeDream: Generalized
    Pipeline Parallelism for DNN Training", 2019; with the flush in "Memory-Efficient Pipeline-Parallel DNN Training",
    2021.
    """
    return _alternating(micro_batches, [stages - stage for stage in range(stages)])


def eager_one_forward_one_backward(stages: int, micro_batches: int) -> list[Order]:
    """Return the orders of eager 1F1B, which hides the time of messages.

    Stage s, counted from 0, keeps the activations of at most ``2 * (stages - s) - 1`` micro-batches. Under 1F1B, each
    forward pass waits for a message that its neighbor sends at the last moment; here the inputs arrive earlier. Source:
    Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2023.
    """
    return _alternating(micro_batches, [2 * (stages - stage) - 1 for stage in range(stages)])


def _alternating(micro_batches: int, most: Sequence[int]) -> list[Order]:
    """Return orders that alternate after the first forward passes.

    Args:
        micro_batches: their number.
        most: the number of micro-batches of which each stage keeps activations.
    """
    orders = []
    for ahead in most:
        order = [Pass(PassKind.FORWARD, i) for i in range(min(ahead, micro_batches))]
        for i in range(micro_batches):
            order.append(Pass(PassKind.BACKWARD, i))
            if i + ahead < micro_batches:
                order.append(Pass(PassKind.FORWARD, i + ahead))
        orders.append(order)
    return orders


def forward_only(stages: int, micro_batches: int) -> list[Order]:
    """Return the orders of inference: the forward passes."""
    return [[Pass(PassKind.FORWARD, i) for i in range(micro_batches)] for _ in range(stages)]


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "eager-1f1b": eager_one_forward_one_backward,
}
"""Schedules of training steps, by name."""


def bubble(stages: int, micro_batches: int) -> float:
    """Return the part of a step in which a stage waits, in theory.

    It is (S - 1) / (M + S - 1) under all schedules, if the stages take equally long and messages take no time. 1F1B
    saves memory, not time.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def makespan(orders: Sequence[Order], duration: Callable[[int, Pass], float]) -> float:
    """Return the time that a schedule takes if messages take no time.

    Args:
        orders: the order of each stage.
        duration: the time of a pass, by stage.

    Raises:
        ValueError: the orders never end, because a stage waits for a pass that is not run before.
    """
    ended: dict[tuple[int, Pass], float] = {}
    free = [0.0] * len(orders)  # time at which each stage has run its passes so far
    left = [list(order) for order in orders]
    while any(left):
        progress = False
        for stage, order in enumerate(left):
            while order and (ready := _ready_at(stage, order[0], len(orders), ended)) is not None:
                one = order.pop(0)
                free[stage] = ended[stage, one] = max(free[stage], ready) + duration(stage, one)
                progress = True
        if not progress:
            raise ValueError(f"no stage can run its next pass: {', '.join(str(order[0]) for order in left if order)}")
    return max(free, default=0.0)


def _ready_at(stage: int, one: Pass, stages: int, ended: dict[tuple[int, Pass], float]) -> float | None:
    """Return the time at which a pass has its input; None if that is not known yet."""
    if one.kind == PassKind.FORWARD:
        return 0.0 if stage == 0 else ended.get((stage - 1, one))
    own = ended.get((stage, Pass(PassKind.FORWARD, one.micro_batch)))
    if own is None or stage == stages - 1:
        return own
    after = ended.get((stage + 1, one))
    return None if after is None else max(own, after)
