"""Telegrad's transports: the same calls over one of them at a time."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench import functions, limits
from bench.groups import ask
from bench.peers.base import Client, Peer
from bench.peers.telegrad import Telegrad
from bench.row import OURS, Family, Row, Samples, Take, timed
from bench.rows.calls import PAIR, SERVER, right

__all__ = ["TRANSPORTS"]

MB = 1 << 20
OURS_ALONE = {OURS: "", "": "this is about the transports of Telegrad"}
VALUES: dict[str, Any] = {"int": 7, "2 floats": PAIR, "4 MB": torch.arange(MB, dtype=torch.float32)}


def over(transport: str, value: Any, _: Peer, take: Take) -> Samples:
    """Return the times of a call in a fresh group that uses only this transport."""
    return {"": ask(Telegrad(transport), 2, called, value, take)}


def called(client: Client, value: Any, take: Take) -> list[float]:
    call = client.caller(SERVER, functions.identity, value)
    right(call(), value)
    return take.loop(lambda: timed(call))


LIMITS: dict[tuple[str, bool], Callable[[Take], Sequence[float]]] = {  # by transport, and whether the value is large
    ("shm", False): limits.ring,
    ("shm", True): partial(limits.copies, 4 * MB, 2),
    ("tcp", False): partial(limits.loopback, 64, 1),
    ("tcp", True): partial(limits.loopback, 4 * MB, 2),
}

TRANSPORTS = Family(
    "transports",
    "those of Telegrad, each alone; limits: a spinning round trip, two copies (shm), a stream on loopback (tcp)",
    tuple(
        Row(
            f"identity, {name}, over {transport}",
            partial(over, transport, value),
            workers=0,
            repeats=100 if name == "4 MB" else 2000,
            only=OURS_ALONE,
            limit=LIMITS.get((transport, name == "4 MB")),
            amount=2 * 4 * MB if name == "4 MB" else 0,
            of="bytes" if name == "4 MB" else "",
        )
        for name, value in VALUES.items()
        for transport in ("shm", "unix", "tcp")
    ),
)
