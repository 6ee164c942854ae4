"""CPU time and memory of a group: of all processes that the competitor needs."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

from bench import functions
from bench.competitors.base import Client, Competitor
from bench.groups import run_in_group
from bench.processes import Meter, descendants
from bench.row import AtMost, Family, Row, Sampler, Samples
from bench.rows.calls import SERVER, right

__all__ = ["COSTS"]

MB = 1 << 20
COUNTED = 10_000  # calls
SETTLING = 2.5  # windows of an idle worker that pass before the first: unused threads exit, cached memory is freed
WAKING = 0.001  # seconds a minute that a single wake-up within a window counts as
PEAK_PROGRAM = Path(__file__).parents[1] / "peak.py"


def group(client: Client) -> list[int]:
    return [client.leader, *descendants(client.leader)]


def calls(client: Client, sampler: Sampler) -> Samples:
    """Measure the processor time of the group for 10,000 consecutive calls."""
    call = client.caller(SERVER, functions.identity, 7)
    right(call(), 7)
    window = sampler.seconds / 2

    def sample() -> float:
        meter = Meter(partial(group, client))
        count, end = 0, time.perf_counter() + window
        while time.perf_counter() < end:
            call()
            count += 1
        return meter.seconds() / count * COUNTED

    return {"": sampler.loop(sample)}


def idle(client: Client, sampler: Sampler) -> Samples:
    """Return the CPU seconds of a worker in a minute without calls, after cleanup.

    The measuring thread is not part of a worker: it sleeps, and the cost of its wake-ups is left out.
    """
    right(client.caller(SERVER, functions.identity, 7)(), 7)
    time.sleep(SETTLING * sampler.seconds)

    def sample() -> float:
        meter, start = Meter(partial(group, client), but_here=True), time.perf_counter()
        time.sleep(sampler.seconds)
        return meter.seconds() / (time.perf_counter() - start) * 60 / client.workers

    return {"": [sample() for _ in range(sampler.least)]}


def memory(size: int, competitor: Competitor, sampler: Sampler) -> Samples:
    """Return the peak memory of a fresh group during a round trip of a tensor.

    It is in megabytes, without that tensor.
    """
    return {"": [run_in_group(competitor, 2, _memory, size, seconds=100) for _ in range(sampler.least)]}


UNSEEN = 10.0  # megabytes that can come and go between two samples, which are a millisecond apart


def _memory(client: Client, size: int) -> float:
    right(client.caller(SERVER, functions.identity, 7)(), 7)
    x = torch.ones(size // 4)
    command = [sys.executable, str(PEAK_PROGRAM), str(client.leader)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_alone()) as peak:
        assert peak.stdin is not None
        assert peak.stdout is not None
        peak.stdout.readline()
        for _ in range(2):
            right(client.caller(SERVER, functions.identity, x)(), x)
        peak.stdin.close()
        first, most = map(float, peak.stdout.read().split())
    return most - first


def _alone() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY"))}


COSTS = Family(
    "costs",
    "processor time and memory of all processes of a group",
    (
        Row("10,000 calls, int", calls, unit="CPU s", seconds=1.0, repeats=2, warm_up=0.1),
        Row(
            "an idle minute of a worker",
            idle,
            fresh=True,
            unit="CPU s",
            seconds=5.0,
            least=1,
            rounds=1,
            resolution=WAKING,
            goals=(AtMost(0.06, "0.1 % of a core"),),
        ),
        Row(
            "400 MB round trip, memory besides it",
            partial(memory, 400 * MB),
            workers=0,
            unit="MB",
            resolution=UNSEEN,
            least=1,
            rounds=2,
            quick=False,
            timeout=240,
        ),
    ),
)
