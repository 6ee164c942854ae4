"""Functions that rows call on other workers.

Every competitor provides exactly these, by name, so all do the same work.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.competitors.base import here

OPERATIONS = 200

allocate: Callable[..., Tensor] = torch.empty  # allocator of handlers' results; a competitor may replace it


def identity(value: Any) -> Any:
    return value


def plus(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def operations(x: Tensor) -> Tensor:
    """Run the 200 operations of the PyTorch RPC talk on the tensor, in place."""
    for _ in range(OPERATIONS):
        x.add_(1.0)
    return x


def copied(x: Tensor) -> Tensor:
    """Return a new tensor instead of the argument."""
    return x.clone()


def built(size: int) -> Tensor:
    """Return a new result of the given number of bytes."""
    return allocate(size // 4).fill_(1.0)


def size_of(x: Tensor) -> int:
    """Take a tensor and return almost nothing: for one-way transfers."""
    return x.numel()


def back() -> Any:
    """Call worker 0 while it waits for this call."""
    return here().caller(0, identity, 7)()


def exchange(x: Tensor) -> int:
    """Send `x` to all other workers at once; return the number of results."""
    client = here()
    others = [rank for rank in range(client.workers) if rank != client.rank]
    return len(client.collect([client.begin(rank, identity, x) for rank in others]))


def hammer(seconds: float) -> int:
    """Call the next worker for the given time, one call at a time; return the number."""
    client = here()
    call = client.caller((client.rank + 1) % client.workers, identity, 7)
    calls, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        call()
        calls += 1
    return calls


def count(amount: int) -> Iterator[int]:
    """Yield integers; only for competitors that stream."""
    yield from range(amount)


class Counter:
    """Remote object with the cheapest possible method."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, amount: int) -> int:
        with self._lock:
            self.total += amount
            return self.total


TABLE: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (identity, plus, operations, copied, built, size_of, back, exchange, hammer)
}
