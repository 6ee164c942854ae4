"""Telegrad's transports: the same calls over one of them at a time."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench import baselines, functions
from bench.competitors.base import Client, Competitor
from bench.competitors.telegrad import Telegrad
from bench.groups import run_in_group
from bench.row import OURS, Family, Row, Sampler, Samples, timed
from bench.rows.calls import PAIR, SERVER, right

__all__ = ["TRANSPORTS"]

MB = 1 << 20
OURS_ALONE = {OURS: "", "": "this is about the transports of Telegrad"}
VALUES: dict[str, Any] = {"int": 7, "2 floats": PAIR, "4 MB": torch.arange(MB, dtype=torch.float32)}


SECRET = "secret of the encrypted groups"


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


BASELINES: dict[tuple[str, bool], Callable[[Sampler], Sequence[float]]] = {  # key: transport, large value
    ("shm", False): baselines.ring,
    ("shm", True): partial(baselines.copies, 4 * MB, 2),
    ("tcp", False): partial(baselines.loopback, 64, 1),
    ("tcp", True): partial(baselines.loopback, 4 * MB, 2),
}

TRANSPORTS = Family(
    "transports",
    "those of Telegrad, each alone; baselines: a spinning round trip, two copies (shm), a stream on loopback (tcp), "
    "the same calls without encryption (tls)",
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
    ),
)
