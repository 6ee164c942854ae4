"""What rows call on other workers. Every peer offers exactly these, by name, so that all do the same work."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.peers.base import here

OPERATIONS = 200

allocate: Callable[..., Tensor] = torch.empty  # what a handler makes its result with; a peer may put its own here


def identity(value: Any) -> Any:
    return value


def plus(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def operations(x: Tensor) -> Tensor:
    """The function of many operations of the PyTorch RPC talk: 200 passes over the tensor, in place."""
    for _ in range(OPERATIONS):
        x.add_(1.0)
    return x


def copied(x: Tensor) -> Tensor:
    """What comes back is another tensor than what came."""
    return x.clone()


def built(size: int) -> Tensor:
    """A result of so many bytes, which is made in place."""
    return allocate(size // 4).fill_(1.0)


def size_of(x: Tensor) -> int:
    """Takes a tensor and returns next to nothing: for what moves one way."""
    return x.numel()


def back() -> Any:
    """Calls worker 0 while it waits for this call."""
    return here().caller(0, identity, 7)()


def exchange(x: Tensor) -> int:
    """Sends `x` to every other worker, all at once, and gets it back; how many came back."""
    client = here()
    others = [rank for rank in range(client.workers) if rank != client.rank]
    return len(client.collect([client.begin(rank, identity, x) for rank in others]))


def hammer(seconds: float) -> int:
    """Calls the next worker for so long, one call after the other; how many calls."""
    client = here()
    call = client.caller((client.rank + 1) % client.workers, identity, 7)
    calls, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        call()
        calls += 1
    return calls


class Counter:
    """A remote object with the cheapest method there is."""

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
