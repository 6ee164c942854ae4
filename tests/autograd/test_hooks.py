"""Contexts and threads of user hooks in backward passes."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import _core, autograd, rpc
from telegrad.autograd import ddp
from telegrad.autograd.context import Context
from telegrad.autograd.execution import leaves
from telegrad.testing import Cluster, eventually


def leaf() -> Tensor:
    return torch.rand(3, requires_grad=True)


@pytest.fixture(autouse=True)
def no_leaks(four: Cluster) -> Iterator[None]:
    yield
    for worker in four:
        eventually(lambda worker=worker: not any(worker._worker.autograd.left().values()))  # type: ignore[misc]


def calling(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(call)
    return y


_seen: list[Any] = []


def call(gradient: Tensor) -> None:
    _seen.append(rpc.rpc_sync("w2", where))


def where() -> int | None:
    scope = rpc.api.current.get()
    return None if scope is None or scope.autograd is None else scope.autograd.id


def test_calls_of_hooks_belong_to_the_context(four: Cluster) -> None:
    _seen.clear()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", calling, (leaf(),))
        autograd.backward(context_id, [calling(y).sum()])
        assert _seen == [context_id] * 2


_hooked: set[str] = set()  # threads in which the hook of `beyond` has run


def double(x: Tensor) -> Tensor:
    return x * 2


def beyond(x: Tensor, to: str) -> Tensor:
    """Call another worker, so that its gradient passes this worker again."""
    y = x * 2
    y.register_hook(lambda _: _hooked.add(threading.current_thread().name))
    return rpc.rpc_sync(to, double, (y,))  # type: ignore[no-any-return]


def test_hooks_run_in_no_unrelated_call(four: Cluster) -> None:
    over = threading.Event()

    def call_all_the_time() -> None:
        with four[1]:
            while not over.is_set():
                assert rpc.rpc_sync("w3", abs, (-1,)) == 1

    other = threading.Thread(target=call_all_the_time, name="another caller")
    other.start()
    _hooked.clear()
    try:
        for _ in range(30):
            x = leaf()
            with autograd.context() as context_id:
                autograd.backward(context_id, [rpc.rpc_sync("w1", beyond, (x, "w2")).sum()])
                assert x in autograd.get_gradients(context_id)
    finally:
        over.set()
        other.join()
    assert {name.rpartition("-")[0] for name in _hooked} <= {"telegrad-w1"}


def is_in(thread: threading.Thread, code: Any) -> bool:
    frame = _core.thread_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def test_passes_of_one_context_take_turns_at_a_leaf_with_hooks() -> None:
    """The second pass arrives while the hook of the first one runs."""
    context, x = Context(1), leaf()
    seen: list[Tensor | None] = []

    def accumulate() -> None:
        leaves.accumulate(context, x, torch.ones(3), False)

    second = threading.Thread(target=accumulate)

    def note(x: Tensor) -> None:
        seen.append(x.grad)
        if len(seen) == 1:
            second.start()
            eventually(lambda: is_in(second, ddp.run_accumulate_grad.__code__))

    x.register_post_accumulate_grad_hook(note)
    accumulate()
    second.join()
    assert torch.equal(context.gradients[x], torch.full((3,), 2.0))
    assert seen[1] is context.gradients[x]
    assert x.grad is None
