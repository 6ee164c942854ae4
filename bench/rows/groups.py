"""Eight workers: one to many, all to all, more workers than cores."""

import time
from functools import partial

import torch

from bench import functions
from bench.competitors.base import Client
from bench.row import Family, Row, Sampler, Samples

__all__ = ["GROUPS"]

WORKERS = 8
MB = 1 << 20


def fan_out(size: int, count: int, client: Client, sampler: Sampler) -> Samples:
    """Send the same tensor to `count` workers at once; all return it."""
    x = torch.ones(size // 4)

    def call() -> list[object]:
        return client.collect([client.begin(rank, functions.identity, x) for rank in range(1, count + 1)])

    if not all(torch.equal(one, x) for one in call()):  # type: ignore[arg-type]
        raise AssertionError("a worker returned another tensor")
    return sampler(call)


def one_way(size: int, count: int, at_once: bool, client: Client, sampler: Sampler) -> Samples:
    """Send the same tensor to `count` workers, by one call for all or one for each."""
    x = torch.ones(size // 4)
    ranks = range(1, count + 1)

    def call() -> list[object]:
        if at_once:
            return client.collect(client.begin_all(ranks, functions.size_of, x))
        return client.collect([client.begin(rank, functions.size_of, x) for rank in ranks])

    if call() != [x.numel()] * count:
        raise AssertionError("a worker got another tensor")
    return sampler(call)


def all_to_all(size: int, client: Client, sampler: Sampler) -> Samples:
    """Send a tensor from every worker to every other and back, all at once."""
    x = torch.ones(size // 4)

    def call() -> list[object]:
        others = [client.begin(rank, functions.exchange, x) for rank in range(1, client.workers)]
        return [functions.exchange(x), *client.collect(others)]

    if call() != [client.workers - 1] * client.workers:
        raise AssertionError("not every tensor came back")
    return sampler(call)


def busy(client: Client, sampler: Sampler) -> Samples:
    """Return the seconds per call while every worker calls the next one."""
    window = sampler.seconds / 2

    def sample() -> float:
        start = time.perf_counter()
        others = [client.begin(rank, functions.hammer, window) for rank in range(1, client.workers)]
        calls: int = functions.hammer(window) + sum(client.collect(others))
        return (time.perf_counter() - start) / calls

    return {"": sampler.loop(sample)}


GROUPS = Family(
    "groups",
    "eight workers on one machine",
    (
        *(
            Row(
                f"1 to {count}, 1 MB each",
                partial(fan_out, MB, count),
                workers=WORKERS,
                seconds=0.25,
                repeats=100,
                quick=count in (1, WORKERS - 1),
                amount=2 * count * MB,
                of="bytes",
            )
            for count in range(1, WORKERS)
        ),
        *(
            Row(
                f"1 to {count}, {label}, one way, {how}",
                partial(one_way, size, count, at_once),
                workers=WORKERS,
                seconds=0.25,
                repeats=100,
                quick=at_once and count == WORKERS - 1 and size == MB,
                amount=count * size,
                of="bytes",
            )
            for label, size in (("1 MB", MB), ("4 MB", 4 * MB))
            for count in (2, 4, WORKERS - 1)
            for how, at_once in (("a call each", False), ("one for all", True))
        ),
        Row(
            "all to all, 8 workers, 1 MB each",
            partial(all_to_all, MB),
            workers=WORKERS,
            seconds=0.8,
            repeats=40,
            amount=2 * WORKERS * (WORKERS - 1) * MB,
            of="bytes",
        ),
        Row(
            "8 busy workers, int, each call",
            busy,
            workers=WORKERS,
            amount=1,
            of="calls",
            seconds=0.8,
            repeats=2,
            warm_up=1e-9,
        ),
    ),
)
