"""Time to start and end a group: `init_rpc` and a graceful `shutdown`.

All workers start at once. Each has imported PyTorch and the package before the clock starts. Run as a program, this
file is one worker: python -m bench.rows.startup PEER RANK WORKERS.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.competitors.base import Competitor, Seat
from bench.competitors.forked import ForkedCompetitor
from bench.groups import free_port
from bench.processes import fork
from bench.row import Family, FasterThan, Row, Sampler, Samples, timed

__all__ = ["STARTUP"]

ROOT = Path(__file__).parents[2]
OTHERS = {"": "has no group that workers join: its calls need none, or it starts their processes itself"}
TORCH_API = OTHERS | {"telegrad": "", "parent": "", "torch": ""}
OURS_ALONE = {
    "telegrad": "",
    "parent": "",
    "": "of 128 workers of torch.distributed.rpc on one host most fail to join: all connect to the first one at once,"
    " and its Unix socket refuses them (connect: Resource temporarily unavailable)",
}


def work(competitor: ForkedCompetitor, rank: int, workers: int, orders: int, answers: int) -> None:
    """Join and leave a group for each port read from a pipe."""
    competitor.prepare()
    os.write(answers, b".")
    with os.fdopen(orders) as lines:
        for line in lines:
            client = competitor.join(Seat(rank, workers, int(line), Path()))
            client.leave()
            os.write(answers, b".")


Start = Callable[[ForkedCompetitor, int, int, int, int], None]


def forked(competitor: ForkedCompetitor, rank: int, workers: int, orders: int, answers: int) -> None:
    fork(partial(work, competitor, rank, workers, orders, answers))


def spawned(competitor: ForkedCompetitor, rank: int, workers: int, orders: int, answers: int) -> None:
    command = [sys.executable, "-m", "bench.rows.startup", competitor.name, str(rank), str(workers)]
    subprocess.Popen(command, stdin=orders, stdout=answers, cwd=ROOT)  # ends with its leader: end_descendants


def together(workers: int, start: Start, competitor: Competitor, sampler: Sampler) -> Samples:
    """Measure the time from the order until all workers have left."""
    assert isinstance(competitor, ForkedCompetitor)
    os.environ["OMP_NUM_THREADS"] = "1"
    if start is forked:
        competitor.prepare()
    with ExitStack() as stack:
        orders, answers = [], []
        for rank in range(workers):
            (order_read, order), (answer, answer_write) = os.pipe(), os.pipe()
            start(competitor, rank, workers, order_read, answer_write)
            os.close(order_read)
            os.close(answer_write)
            orders.append(stack.enter_context(os.fdopen(order, "w", buffering=1)))
            answers.append(stack.enter_context(os.fdopen(answer, "rb", buffering=0)))

        def all_answer() -> None:
            for rank, answer in enumerate(answers):
                if answer.read(1) != b".":
                    raise RuntimeError(f"worker {rank} has failed")

        def once() -> None:
            port = free_port()
            for order in orders:
                order.write(f"{port}\n")
            all_answer()

        all_answer()  # ready
        return {"": sampler.loop(lambda: timed(once))}


def count_of(workers: int, start: Start, *goals: FasterThan) -> Row:
    alone = workers > 32
    return Row(
        f"init and shutdown, {workers} workers{', forks' if start is forked else ''}",
        partial(together, workers, start),
        workers=0,
        seconds=1.0,
        repeats=5,
        least=2 if workers > 8 else 3,
        warm_up=0 if workers > 8 else 1e-9,
        rounds=1 if workers > 8 else 2,
        only=OURS_ALONE if alone else TORCH_API,
        goals=goals,
        quick=workers <= 2,
        timeout=240,
    )


STARTUP = Family(
    "startup",
    "joining and leaving a group, all workers at once",
    (
        count_of(2, spawned),
        count_of(8, spawned),
        count_of(32, spawned, FasterThan(5)),
        count_of(128, forked),
        count_of(256, forked),
    ),
)


if __name__ == "__main__":
    from bench.competitors.table import COMPETITORS

    chosen = COMPETITORS[sys.argv[1]]
    assert isinstance(chosen, ForkedCompetitor)
    out = os.dup(1)
    os.dup2(2, 1)  # output of a package is no answer
    work(chosen, int(sys.argv[2]), int(sys.argv[3]), os.dup(0), out)
