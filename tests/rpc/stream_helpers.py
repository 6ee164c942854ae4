"""Generators that the tests of streams run."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator

from telegrad.testing import Gate, Local


def numbers(n: int) -> Iterator[int]:
    yield from range(n)


async def numbers_async(n: int) -> AsyncIterator[int]:
    for i in range(n):
        if i % 3 == 0:
            await asyncio.sleep(0)
        yield i


def endless(ended: Local[threading.Event], counts: Local[list[int]]) -> Iterator[int]:
    try:
        for i in itertools.count():
            counts.value.append(i)
            yield i
    finally:
        ended.value.set()


async def endless_async(ended: Local[threading.Event], counts: Local[list[int]]) -> AsyncIterator[int]:
    try:
        for i in itertools.count():
            counts.value.append(i)
            yield i
            await asyncio.sleep(0)
    finally:
        ended.value.set()


async def waits_forever(ended: Local[threading.Event], counts: Local[list[int]]) -> AsyncIterator[int]:
    try:
        yield 0
        await asyncio.Event().wait()
    finally:
        ended.value.set()


def bursts(gate: Gate) -> Iterator[int]:
    yield 0
    yield 1
    yield 2
    gate.enter()
    yield 3


GENERATORS = [numbers, numbers_async]
ENDLESS = [endless, endless_async, waits_forever]
