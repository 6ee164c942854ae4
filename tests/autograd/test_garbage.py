"""Calls, references and backward passes leave no reference cycles.

The cycle collector would run late and hold tensors until then.
"""

import gc
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.testing import Cluster, eventually

TIMES = 20


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def there_and_on(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("w2", double, (x * 3,)) + x


def one_pass(to: Callable[[torch.Tensor], torch.Tensor] = double) -> None:
    x = torch.rand(3, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", to, (x,)).sum()])
        assert x in autograd.get_gradients(context_id)


def reference() -> None:
    rref = rpc.remote("w1", double, (torch.ones(2),))
    assert rref.to_here().sum() == 4
    assert rref.rpc_sync().sum() == 4


def many() -> None:
    torch.futures.wait_all([rpc.rpc_async("w1", double, (torch.ones(2),)) for _ in range(10)])


@pytest.mark.parametrize(
    "use",
    [lambda: rpc.rpc_sync("w1", double, (1,)), many, reference, one_pass, lambda: one_pass(there_and_on)],
    ids=["call", "futures", "reference", "pass", "pass over three workers"],
)
def test_no_garbage_needs_the_collector(four: Cluster, use: Callable[[], object]) -> None:
    use()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(TIMES):
            use()
        for worker in four:
            mine = worker._worker
            eventually(lambda mine=mine: not any(mine.autograd.left().values()))  # type: ignore[misc]
            eventually(lambda mine=mine: mine.references.stats().owners == 0)  # type: ignore[misc]
        gc.collect()
        found = Counter(type(o).__name__ for o in gc.garbage if type(o).__module__.startswith("telegrad"))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not {name: count for name, count in found.items() if count >= TIMES}
