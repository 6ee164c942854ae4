"""Baselines of rows: the same work without a framework, in the same run."""

import statistics
from collections.abc import Sequence

import torch

from bench import baseline
from bench.functions import OPERATIONS, identity
from bench.row import Sampler, timed

LONG = 0.5  # seconds; enough because these repeat evenly
BATCH = 200  # calls timed together if one takes less time than reading the clock


def ring(sampler: Sampler) -> Sequence[float]:
    """Measure a round trip through shared memory between two processes that spin."""
    return baseline.measure("ring", min(sampler.seconds, LONG))


def call_of(value: object, sampler: Sampler) -> list[float]:
    """Measure the minimum of a call of `identity`.

    It is the sum of four medians, each measured alone in one process: the round trip, the Python call, encoding and
    decoding in both directions.
    """
    from telegrad.serialize.tensor_layout import make_codec

    codec = make_codec()
    call, reply = codec.encode(((value,), {})), codec.encode(value)
    assert call is not None
    assert reply is not None

    def coded(message: object, encoded: tuple[bytes, list[tuple[int, int, object]]]) -> list[float]:
        body, segments = encoded
        return batches(
            sampler, lambda: codec.encode(message), lambda: codec.decode(body, [bytearray(s[1]) for s in segments])
        )

    parts = [
        ring(sampler),
        batches(sampler, lambda: identity(value)),
        coded(((value,), {}), call),
        coded(value, reply),
    ]
    return [sum(statistics.median(part) for part in parts)]


def batches(sampler: Sampler, *steps: object) -> list[float]:
    """Measure the seconds of one run of all `steps`, in consecutive batches."""

    def batch() -> None:
        for _ in range(BATCH):
            for step in steps:
                step()  # type: ignore[operator]

    return [seconds / BATCH for seconds in sampler.loop(lambda: timed(batch))]


def copies(size: int, times: int, sampler: Sampler) -> list[float]:
    """Measure the given number of copies within warm memory."""
    return [times * seconds for seconds in baseline.measure("memcpy", size, min(sampler.seconds, LONG))]


def filled(size: int, sampler: Sampler) -> list[float]:
    """Measure writing a tensor in warm memory."""
    torch.set_num_threads(1)
    x = torch.zeros(size // 4)
    return sampler.loop(lambda: timed(lambda: x.fill_(1.0)))


def loopback(size: int, times: int, sampler: Sampler) -> list[float]:
    """Measure sending bytes through loopback TCP, and a byte back, `times` times."""
    return [times * seconds for seconds in baseline.measure("stream", size, min(sampler.seconds, LONG))]


def worked(size: int, sampler: Sampler) -> list[float]:
    """Measure the talk's 200 operations on a local tensor, and two copies of it."""
    torch.set_num_threads(1)
    x = torch.zeros(size // 4)
    there_and_back = statistics.median(copies(size, 2, sampler))

    def work() -> None:
        for _ in range(OPERATIONS):
            x.add_(1.0)

    return [seconds + there_and_back for seconds in sampler.loop(lambda: timed(work))]
