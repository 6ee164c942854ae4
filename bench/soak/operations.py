"""Operations of the members, each with a check of its result.

The check makes the same computation in one process.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from telegrad import autograd, optim, rpc
from telegrad.rpc import RRef

TIMEOUT = 20.0  # s; an operation that takes longer hangs


class Wrong(Exception):
    """A result differs from the local one."""


@dataclass(frozen=True)
class Choice:
    """Input of one operation."""

    peers: Sequence[str]  # names of other members, different ones
    random: random.Random


def equal(got: Any, expected: Any, what: str) -> None:
    same = torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected
    if not same:
        raise Wrong(f"{what}: {str(got)[:200]} instead of {str(expected)[:200]}")


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.allclose(got, expected, rtol=1e-5, atol=1e-6):
        raise Wrong(f"{what}: {str(got)[:200]} instead of {str(expected)[:200]}")


# ---- functions of the callees


def transform(number: int, text: str, values: list[float]) -> dict[str, Any]:
    return {"number": number * 3 + 1, "text": text[::-1], "sum": sum(values)}


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def fail(text: str) -> None:
    raise ValueError(text)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def product_at(name: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute on a further member, which the backward pass visits too."""
    return rpc.rpc_sync(name, product, args=(x * 2, w), timeout=TIMEOUT) + x


def read(counter: "RRef[Counter]", amount: int) -> int:
    """Use a reference that another member passed on."""
    return int(counter.rpc_sync(timeout=TIMEOUT).add(amount))


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


class Layer:
    """Parameter of an optimizer."""

    def __init__(self, seed: int) -> None:
        self.weight = initial(seed).requires_grad_()

    def parameter(self) -> "RRef[torch.Tensor]":
        return RRef(self.weight)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).pow(2).sum()

    def value(self) -> torch.Tensor:
        return self.weight.detach().clone()


def initial(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


# ---- the operations


def call(choice: Choice) -> None:
    number, text = choice.random.randrange(10**9), f"text {choice.random.random()}"
    args = (number, text, [1.5, 2.5, float(number % 7)])
    equal(rpc.rpc_sync(choice.peers[0], transform, args=args, timeout=TIMEOUT), transform(*args), "a call")


def error(choice: Choice) -> None:
    text = f"error {choice.random.random()}"
    try:
        rpc.rpc_sync(choice.peers[0], fail, args=(text,), timeout=TIMEOUT)
    except ValueError as e:
        if text not in str(e):
            raise Wrong(f"an error: {e} instead of {text}") from e
    else:
        raise Wrong("an error did not arrive")


def tensor(choice: Choice) -> None:
    size = choice.random.choice((10, 5_000, 100_000, 1_000_000))
    x = torch.arange(size, dtype=torch.float32) + choice.random.randrange(100)
    equal(rpc.rpc_sync(choice.peers[0], scale, args=(x, 2.0), timeout=TIMEOUT), x * 2, "a tensor")


def fan_out(choice: Choice) -> None:
    numbers = range(16)
    futures = [
        rpc.rpc_async(choice.peers[n % len(choice.peers)], transform, args=(n, "x" * n, [1.0] * n), timeout=TIMEOUT)
        for n in numbers
    ]
    results, first = [], None
    for future in futures:  # wait for all of them, also after a failure
        try:
            results.append(future.wait())
        except Exception as e:
            first = first or e
    if first is not None:
        raise first
    equal(results, [transform(n, "x" * n, [1.0] * n) for n in numbers], "calls at once")


def reference(choice: Choice) -> None:
    start = choice.random.randrange(1000)
    counter = rpc.remote(choice.peers[0], Counter, args=(start,), timeout=TIMEOUT)
    equal(counter.rpc_sync(timeout=TIMEOUT).add(5), start + 5, "a method")
    passed = rpc.rpc_sync(choice.peers[-1], read, args=(counter, 7), timeout=TIMEOUT)
    equal(passed, start + 12, "a passed reference")
    equal(counter.to_here(timeout=TIMEOUT).value, start + 12, "a fetched value")


def backward(choice: Choice) -> None:
    seed = choice.random.randrange(2**31)
    x, w = initial(seed).requires_grad_(), initial(seed + 1).T.contiguous().requires_grad_()
    with autograd.context() as context:
        y = rpc.rpc_sync(choice.peers[0], product, args=(x, w), timeout=TIMEOUT)
        z = rpc.rpc_sync(choice.peers[-1], product_at, args=(choice.peers[0], y, y.detach().T), timeout=TIMEOUT)
        autograd.backward(context, [z.sum()])
        gradients = autograd.get_gradients(context)
        here = gradients[x], gradients[w]
    y = product(x, w)
    torch.autograd.backward([(product(y * 2, y.detach().T) + y).sum()])
    assert x.grad is not None
    assert w.grad is not None
    close(here[0], x.grad, "a gradient of the input")
    close(here[1], w.grad, "a gradient of the weight")


def step(choice: Choice) -> None:
    seed = choice.random.randrange(2**31)
    x = initial(seed + 1).T.contiguous()
    layer = rpc.remote(choice.peers[0], Layer, args=(seed,), timeout=TIMEOUT)
    parameter = layer.rpc_sync(timeout=TIMEOUT).parameter()
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.1)
    with autograd.context() as context:
        autograd.backward(context, [layer.rpc_sync(timeout=TIMEOUT).loss(x)])
        optimizer.step(context)
    here = Layer(seed)
    torch.autograd.backward([here.loss(x)])
    torch.optim.SGD([here.weight], lr=0.1).step()
    close(layer.rpc_sync(timeout=TIMEOUT).value(), here.value(), "a step")


OPERATIONS: dict[str, tuple[Callable[[Choice], None], int]] = {  # with their weight
    "call": (call, 8),
    "error": (error, 1),
    "tensor": (tensor, 3),
    "calls at once": (fan_out, 2),
    "reference": (reference, 3),
    "backward pass": (backward, 2),
    "optimizer step": (step, 2),
}
