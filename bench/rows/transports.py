"""Telegrad's transports: the same calls over one of them at a time."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench import baselines, functions
from bench.competitors.base import Client, Competitor
from bench.competitors.telegrad import Telegrad
from bench.groups import run_in_group
from bench.row import BASELINE, OURS, Family, Row, Sampler, Samples, WithinBaseline, timed
from bench.rows.calls import PAIR, SERVER, right

__all__ = ["TRANSPORTS"]

MB = 1 << 20
OURS_ALONE = {OURS: "", "": "this is about the transports of Telegrad"}
VALUES: dict[str, Any] = {"int": 7, "2 floats": PAIR, "4 MB": torch.arange(MB, dtype=torch.float32)}


SECRET = "secret of the encrypted groups"
PAUSE = 500e-6
ALONGSIDE = 20  # times the time of a call alone


def over(transport: str, value: Any, _: Competitor, sampler: Sampler) -> Samples:
    """Return the times of a call in a fresh group that uses only this transport."""
    return {"": run_in_group(Telegrad(transport), 2, called, value, sampler)}


def encrypted(value: Any, _: Competitor, sampler: Sampler) -> Samples:
    return {"": run_in_group(Telegrad("tcp", secret=SECRET), 2, called, value, sampler)}


def not_encrypted(value: Any, sampler: Sampler) -> Sequence[float]:
    found: Sequence[float] = run_in_group(Telegrad("tcp"), 2, called, value, sampler)
    return found


def called(client: Client, value: Any, sampler: Sampler) -> list[float]:
    call = client.caller(SERVER, functions.identity, value)
    right(call(), value)
    return sampler.loop(lambda: timed(call))


def alongside(transport: str, size: int, _: Competitor, sampler: Sampler) -> Samples:
    """Return the times of small calls during transfers; the baseline: calls alone."""
    seconds = max(sampler.seconds, 1.0)
    found: Samples = run_in_group(Telegrad(transport), 2, calls_alongside, size, seconds, seconds=180.0)
    return found


def calls_alongside(client: Client, size: int, seconds: float) -> dict[str, list[float]]:
    """Call alone, and while tensors of `size` bytes go to the worker and back."""
    call = client.caller(SERVER, functions.identity, 7)
    x = torch.zeros(size // 4)
    right(call(), 7)
    alone = calls_until(call, time.perf_counter() + min(seconds, 1.0))
    stop, first = threading.Event(), threading.Event()

    def transfer() -> None:
        while not stop.is_set():
            client.collect([client.begin(SERVER, functions.size_of, x)])  # as an argument
            first.set()
            client.collect([client.begin(SERVER, functions.built, size)])  # as a result

    thread = threading.Thread(target=transfer)
    thread.start()
    first.wait()  # the first transfer also obtains memory
    found = calls_until(call, time.perf_counter() + seconds)
    stop.set()
    thread.join()
    return {"": found, BASELINE: alone}


def calls_until(call: Callable[[], Any], end: float) -> list[float]:
    """Return the times of calls, with pauses to meet all parts of a transfer."""
    found: list[float] = []
    while time.perf_counter() < end:
        found.append(timed(call))
        time.sleep(PAUSE)
    return found


BASELINES: dict[tuple[str, bool], Callable[[Sampler], Sequence[float]]] = {  # key: transport, large value
    ("shm", False): baselines.ring,
    ("shm", True): partial(baselines.copies, 4 * MB, 2),
    ("tcp", False): partial(baselines.loopback, 64, 1),
    ("tcp", True): partial(baselines.loopback, 4 * MB, 2),
}

TRANSPORTS = Family(
    "transports",
    "those of Telegrad, each alone; baselines: a spinning round trip, two copies (shm), a stream on loopback (tcp), "
    "the same calls without encryption (tls), the same calls alone (alongside transfers)",
    tuple(
        Row(
            f"identity, {name}, over {transport}",
            partial(over, transport, value),
            workers=0,
            repeats=100 if name == "4 MB" else 2000,
            only=OURS_ALONE,
            baseline=BASELINES.get((transport, name == "4 MB")),
            amount=2 * 4 * MB if name == "4 MB" else 0,
            of="bytes" if name == "4 MB" else "",
        )
        for name, value in VALUES.items()
        for transport in ("shm", "unix", "tcp")
    )
    + tuple(
        Row(
            f"identity, {name}, over tls",
            partial(encrypted, value),
            workers=0,
            repeats=30 if amount else 2000,
            only=OURS_ALONE,
            baseline=partial(not_encrypted, value),
            amount=2 * amount,
            of="bytes" if amount else "",
        )
        for name, value, amount in (("int", 7, 0), ("64 MB", torch.arange(16 * MB, dtype=torch.float32), 64 * MB))
    )
    + tuple(
        Row(
            f"int alongside transfers of 2 GB, over {transport}",
            partial(alongside, transport, 2048 * MB),
            workers=0,
            seconds=10.0,
            rounds=1,
            only=OURS_ALONE,
            goals=(WithinBaseline(ALONGSIDE),),
            quick=False,
            timeout=240,
        )
        for transport in ("shm", "tcp")
    ),
)
