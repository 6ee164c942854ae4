"""Small calls between two processes: cost of one, and number in flight."""

import threading
import time
from functools import partial
from typing import Any

import torch

from bench import baselines, functions
from bench.competitors.base import Client
from bench.row import BASELINE, Family, FasterThan, Row, Sampler, Samples, WithinBaseline, timed

__all__ = ["CALLS", "THREADS"]

IN_FLIGHT = 1000
MAPPED = 100_000
STREAMED = 10_000
SILENCE = 1.0  # seconds without a call before a cold one
PAIR = torch.tensor([1.0, 2.0])
SERVER = 1
TORCH_API = {"telegrad": "", "parent": "", "torch": "", "torch uv": ""}
NO_MAP = {"telegrad": "", "": "has no map: 1000 calls in flight is its counterpart"}
NO_STREAMS = {"telegrad": "", "parent": "", "": "is not measured: it has other streams, or none"}
NO_REFERENCES = TORCH_API | {"": "has no references to results that a call could fetch"}


def right(result: object, expected: object) -> None:
    """Raise an error if a call returned a wrong result."""
    if isinstance(expected, torch.Tensor):
        good = isinstance(result, torch.Tensor) and torch.equal(result, expected)
    else:
        good = result == expected
    if not good:
        raise AssertionError("a call returned a wrong result")


def of(function: Any, args: tuple[Any, ...], expected: object, client: Client, sampler: Sampler) -> Samples:
    call = client.caller(SERVER, function, *args)
    right(call(), expected)
    return sampler(call)


def fetched(client: Client, sampler: Sampler) -> Samples:
    rpc: Any = client.rpc
    to = rpc.get_worker_info(f"worker{SERVER}")

    def call() -> Any:
        return rpc.remote(to, functions.identity, args=(PAIR,)).to_here()

    right(call(), PAIR)
    return sampler(call)


def method(client: Client, sampler: Sampler) -> Samples:
    call = client.method(SERVER, functions.Counter, "add", 0)
    right(call(), 0)
    return sampler(call)


def in_flight(client: Client, sampler: Sampler) -> Samples:
    def call() -> list[Any]:
        return client.collect([client.begin(SERVER, functions.identity, i) for i in range(IN_FLIGHT)])

    right(call(), list(range(IN_FLIGHT)))
    return sampler(call)


def mapped(client: Client, sampler: Sampler) -> Samples:
    rpc: Any = client.rpc
    to = rpc.get_worker_info(f"worker{SERVER}")

    def call() -> int:
        return sum(rpc.map(to, functions.identity, range(MAPPED)))

    right(call(), sum(range(MAPPED)))
    return sampler(call)


def streamed(client: Client, sampler: Sampler) -> Samples:
    rpc: Any = client.rpc
    to = rpc.get_worker_info(f"worker{SERVER}")

    def call() -> int:
        return sum(rpc.stream(to, functions.count, args=(STREAMED,)))

    right(call(), sum(range(STREAMED)))
    return sampler(call)


def first_item(client: Client, sampler: Sampler) -> Samples:
    """Measure the first item of a stream alternately with a call, the baseline."""
    rpc: Any = client.rpc
    to = rpc.get_worker_info(f"worker{SERVER}")

    def step() -> tuple[float, float]:
        call = timed(lambda: rpc.rpc_sync(to, functions.identity, args=(0,)))
        start = time.perf_counter()
        stream = rpc.stream(to, functions.count, args=(1,))
        right(next(stream), 0)
        item = time.perf_counter() - start
        right(list(stream), [])  # the end is not measured
        return item, call

    items, calls = zip(*sampler.loop(step), strict=True)
    return {"": items, BASELINE: calls}


def nested(client: Client, sampler: Sampler) -> Samples:
    call = client.caller(SERVER, functions.back)
    right(call(), 7)
    return sampler(call)


def cold(client: Client, sampler: Sampler) -> Samples:
    call = client.caller(SERVER, functions.identity, 7)
    right(call(), 7)

    def after_silence() -> float:
        time.sleep(SILENCE)
        return timed(call)

    return {"": sampler.loop(after_silence)}


def threaded(count: int, client: Client, sampler: Sampler) -> Samples:
    """Measure the seconds per call of threads that each make one call at a time."""
    window = sampler.seconds / 3
    call = client.caller(SERVER, functions.identity, 7)

    def sample() -> float:
        done = [0] * count
        failed: list[BaseException] = []
        barrier = threading.Barrier(count + 1)

        def work(index: int) -> None:
            try:
                barrier.wait()
                calls, end = 0, time.perf_counter() + window
                while time.perf_counter() < end:
                    call()
                    calls += 1
                done[index] = calls
            except BaseException as e:
                failed.append(e)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        barrier.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return (time.perf_counter() - start) / sum(done)

    return {"": sampler.loop(sample)}


CALLS = Family(
    "calls",
    "small calls between two processes",
    (
        Row("torch.add, 2 floats", partial(of, functions.plus, (PAIR, PAIR), PAIR + PAIR)),
        Row(
            "identity, int",
            partial(of, functions.identity, (7,), 7),
            goals=(FasterThan(70), WithinBaseline(4)),
            baseline=partial(baselines.call_of, 7),
        ),
        Row(
            "identity, 2 floats",
            partial(of, functions.identity, (PAIR,), PAIR),
            goals=(FasterThan(50), WithinBaseline(4)),
            baseline=partial(baselines.call_of, PAIR),
        ),
        Row("remote().to_here(), 2 floats", fetched, goals=(FasterThan(40),), only=NO_REFERENCES),
        Row("method of a remote object, int", method, goals=(FasterThan(40),)),
        Row("nested call, int", nested, goals=(FasterThan(15),)),
        Row(
            "cold call, after 1 s of silence",
            cold,
            goals=(FasterThan(8),),
            seconds=2.9,
            repeats=3,
            warm_up=0,
            timeout=90,
        ),
        Row("stream of 10,000 items, int", streamed, amount=STREAMED, of="items", only=NO_STREAMS),
        Row(
            "first item of a stream, int; baseline: a call",
            first_item,
            only=NO_STREAMS,
            goals=(WithinBaseline(1),),
        ),
        Row("1000 calls in flight, int", in_flight, amount=IN_FLIGHT, of="calls", goals=(FasterThan(60),)),
        Row("map of identity, int", mapped, amount=MAPPED, of="items", only=NO_MAP),
    ),
)

THREADS = Family(
    "threads",
    "calls of several threads of one process to another, for each call",
    tuple(
        Row(
            f"{count} calling thread{'s' * (count > 1)}, int",
            partial(threaded, count),
            amount=1,
            of="calls",
            repeats=3,
        )
        for count in (1, 2, 4, 8)
    ),
)
