"""What a row's cost would be if nothing were in the way: the same work without a framework, in the same run."""

import statistics
from collections.abc import Sequence

import torch

from bench import limit
from bench.functions import OPERATIONS, identity
from bench.row import Take, timed

LONG = 0.5  # seconds are enough for what is repeated that evenly
BATCH = 200  # calls timed together where one takes less than reading the clock costs


def ring(take: Take) -> Sequence[float]:
    """A round trip through shared memory between two processes that spin."""
    return limit.measure("ring", min(take.seconds, LONG))


def call_of(value: object, take: Take) -> list[float]:
    """What a call of `identity` cannot do without: the round trip, the Python call, encoding and decoding both ways.

    One sample: the sum of the four medians, each measured alone in one process.
    """
    from telegrad.serialize.tensors import make_codec

    codec = make_codec()
    call, reply = codec.encode(((value,), {})), codec.encode(value)
    assert call is not None
    assert reply is not None

    def coded(message: object, encoded: tuple[bytes, list[tuple[int, int, object]]]) -> list[float]:
        body, segments = encoded
        return batches(
            take, lambda: codec.encode(message), lambda: codec.decode(body, [bytearray(s[1]) for s in segments])
        )

    parts = [
        ring(take),
        batches(take, lambda: identity(value)),
        coded(((value,), {}), call),
        coded(value, reply),
    ]
    return [sum(statistics.median(part) for part in parts)]


def batches(take: Take, *steps: object) -> list[float]:
    """Seconds for one run of all `steps`, of batches in a row."""

    def batch() -> None:
        for _ in range(BATCH):
            for step in steps:
                step()  # type: ignore[operator]

    return [seconds / BATCH for seconds in take.loop(lambda: timed(batch))]


def copies(size: int, times: int, take: Take) -> list[float]:
    """So many copies within warm memory."""
    return [times * seconds for seconds in limit.measure("memcpy", size, min(take.seconds, LONG))]


def filled(size: int, take: Take) -> list[float]:
    """A tensor written here, in warm memory."""
    torch.set_num_threads(1)
    x = torch.zeros(size // 4)
    return take.loop(lambda: timed(lambda: x.fill_(1.0)))


def loopback(size: int, times: int, take: Take) -> list[float]:
    """So many bytes through TCP within this machine, and a byte back, so many times."""
    return [times * seconds for seconds in limit.measure("stream", size, min(take.seconds, LONG))]


def worked(size: int, take: Take) -> list[float]:
    """The talk's 200 operations on a tensor here, and two copies of it."""
    torch.set_num_threads(1)
    x = torch.zeros(size // 4)
    there_and_back = statistics.median(copies(size, 2, take))

    def work() -> None:
        for _ in range(OPERATIONS):
            x.add_(1.0)

    return [seconds + there_and_back for seconds in take.loop(lambda: timed(work))]
