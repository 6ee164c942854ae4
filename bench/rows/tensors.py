"""Round trips of tensors: the grid of the PyTorch RPC talk, and sizes in between."""

from functools import partial
from typing import Any

import torch

from bench import baselines, functions
from bench.competitors.base import Client
from bench.row import Family, FasterThan, Row, Sampler, Samples, WithinBaseline
from bench.rows.calls import SERVER, right

__all__ = ["TENSORS"]

KB, MB = 1 << 10, 1 << 20
OF_MEMCPY = WithinBaseline(1 / 0.8)  # moved bytes per second at least 0.8 of memcpy's


def moved(size: int, client: Client, sampler: Sampler) -> Samples:
    x = torch.arange(size // 4, dtype=torch.float32)
    call = client.caller(SERVER, functions.identity, x)
    right(call(), x)
    return sampler(call)


def copied(size: int, client: Client, sampler: Sampler) -> Samples:
    x = torch.arange(size // 4, dtype=torch.float32)
    call = client.caller(SERVER, functions.copied, x)
    right(call(), x)
    return sampler(call)


def worked(size: int, client: Client, sampler: Sampler) -> Samples:
    x = torch.zeros(size // 4)
    call = client.caller(SERVER, functions.operations, x)
    if sampler.warm_up:
        right(call(), x + functions.OPERATIONS)
    return sampler(call)


def built(size: int, client: Client, sampler: Sampler) -> Samples:
    call = client.caller(SERVER, functions.built, size)
    right(call(), torch.ones(size // 4))
    return sampler(call)


def sized(label: str, size: int, seconds: float, repeats: int, *goals: FasterThan | WithinBaseline, **rest: Any) -> Row:
    """Return a row for identity of `size` bytes; the baseline is two copies of them."""
    return Row(
        f"identity, {label}",
        partial(moved, size),
        seconds=seconds,
        repeats=repeats,
        least=1 if size > 10 * MB else 2,
        warm_up=0.1 if size < 10 * MB else 1e-9,
        baseline=partial(baselines.copies, size, 2),
        amount=2 * size,
        of="bytes",
        goals=goals,
        quick=size < 10 * MB,
        timeout=180,
        **rest,
    )


# The talk repeats every call 10 times. The rows of its grid do the same over all rounds if that takes a few seconds at
# most; otherwise fewer times, except with --full. (200 operations on 400 MB take five seconds with any framework.)
TENSORS = Family(
    "tensors",
    "round trips of tensors; the grid of the talk is {4 MB, 400 MB} x {identity, 200 operations}",
    (
        sized("4 KB", 4 * KB, 0.2, 2000),
        sized("64 KB", 64 * KB, 0.2, 2000),
        sized("1 MB", MB, 0.2, 200),
        sized("4 MB", 4 * MB, 0.5, 100, FasterThan(5), OF_MEMCPY),
        Row(
            "200 operations, 4 MB",
            partial(worked, 4 * MB),
            seconds=0.6,
            repeats=5,
            least=4,
            warm_up=1e-9,
            baseline=partial(baselines.worked, 4 * MB),
        ),
        Row(
            "a copy of 4 MB",
            partial(copied, 4 * MB),
            seconds=0.5,
            repeats=100,
            warm_up=0.1,
            baseline=partial(baselines.copies, 4 * MB, 3),
            amount=8 * MB,
            of="bytes",
        ),
        Row(
            "a result of 4 MB, built in place",
            partial(built, 4 * MB),
            seconds=0.5,
            repeats=100,
            warm_up=0.1,
            baseline=partial(baselines.filled, 4 * MB),
            amount=4 * MB,
            of="bytes",
        ),
        sized("40 MB", 40 * MB, 0.8, 10),
        sized("400 MB", 400 * MB, 6.0, 5, FasterThan(7), OF_MEMCPY, rounds=2),
        Row(
            "200 operations, 400 MB",
            partial(worked, 400 * MB),
            seconds=1.0,
            repeats=10,
            least=1,
            warm_up=0,
            rounds=2,
            baseline=partial(baselines.worked, 400 * MB),
            quick=False,
            timeout=240,
        ),
    ),
)
