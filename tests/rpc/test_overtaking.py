"""Small calls complete while a large message is being sent.

Decision 19 in `docs/decisions` says why. `csrc/tests/engine_overtaking_test.cc` checks the order of messages, on
links that nothing reads meanwhile.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.options import Options
from telegrad.streams.batches import ENDED, LIVE
from telegrad.streams.receiver import Receiver
from telegrad.testing import Cluster, assert_quiescent, cluster

LARGE = 64 << 20  # floats, 256 MB: hundreds of small calls
TIMES = 20  # in order, no more than one small call would complete meanwhile


def echo(x: Any) -> Any:
    return x


def filled(size: int) -> torch.Tensor:
    return torch.ones(size)


def items(count: int, size: int) -> Iterator[torch.Tensor]:
    for i in range(count):
        yield torch.full((size if i % 3 == 1 else 1,), float(i))


@pytest.fixture(scope="module", params=["shm", "unix", "tcp"])
def group(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with cluster(2, options=Options(rpc_timeout=120, transports=(request.param,))) as workers:
        yield workers
        for worker in workers:
            assert_quiescent(worker)


def small_calls_during(large: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many small calls complete while `large` runs, and its result."""
    results: list[Any] = []
    begun = threading.Event()

    def run() -> None:
        begun.set()
        results.append(large())

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))  # of the same worker
    thread.start()
    begun.wait()
    calls = 0
    while thread.is_alive():
        assert rpc.rpc_sync("w1", echo, (calls,)) == calls
        calls += 1
    thread.join()
    return calls, results[0]


def test_small_calls_during_a_large_argument_and_a_large_result(group: Cluster) -> None:
    x = torch.ones(LARGE)
    calls, size = small_calls_during(lambda: rpc.rpc_sync("w1", torch.numel, (x,)))
    assert size == LARGE
    assert calls > TIMES
    calls, result = small_calls_during(lambda: rpc.rpc_sync("w1", filled, (LARGE,)))
    assert torch.equal(result, x)
    assert calls > TIMES


def test_streams_keep_their_order(group: Cluster) -> None:
    """Batches of a stream arrive in any order; the reader gets the items in order."""
    size = 2 << 20
    found = [float(item[0]) for item in rpc.stream("w1", items, (30, size))]
    assert found == [float(i) for i in range(30)]


def test_a_stream_requests_nothing_while_an_earlier_batch_is_on_its_way(group: Cluster) -> None:
    """The last batch may overtake a large one, when the callee has closed the stream."""
    stream = Receiver(group[0]._worker, 1, "items", 0, 8, None)
    stream._is_pulling = False
    stream._accept((1, ENDED, 0, ["second"]))
    assert stream._claim_pull() == 0
    stream._accept((0, LIVE, 0, ["first"]))
    assert stream._has_ended
    assert [batch[3] for batch in stream._ready] == [["first"], ["second"]]
