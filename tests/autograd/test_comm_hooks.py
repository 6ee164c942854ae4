"""Communication hooks: compressed gradients in the messages of backward passes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd import GradientBucket
from telegrad.testing import Cluster, assert_quiescent, cluster


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    with cluster(3) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_left(w: Cluster) -> Iterator[None]:
    yield
    for worker in w:
        assert_quiescent(worker)


def double(x: Tensor) -> Tensor:
    return x * 2


def twice(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, y * 3


def onward(x: Tensor) -> Tensor:
    return rpc.rpc_sync("w2", double, (x,)) * 2


def to_half(state: list[GradientBucket], bucket: GradientBucket) -> Any:
    state.append(bucket)
    return to_float, ([None if g is None else g.half() for g in bucket.gradients],)


def to_float(gradients: list[Tensor | None]) -> list[Tensor | None]:
    return [None if g is None else g.float() for g in gradients]


def gradient(function: Any = double, value: float = 1 / 3) -> Tensor:
    """Return the gradient of a leaf here, after a pass through w1."""
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", function, (x,))
        autograd.backward(context_id, [(y * value).sum()])
        return autograd.get_gradients(context_id)[x]


HALF_THIRD = torch.full((3,), 1 / 3).half().float()


def test_gradients_are_compressed_on_their_way_there() -> None:
    seen: list[GradientBucket] = []
    with autograd.register_comm_hook(seen, to_half):
        assert torch.equal(gradient(), HALF_THIRD * 2)
    assert [bucket.to for bucket in seen] == ["w1"]
    assert torch.equal(gradient(), torch.full((3,), 1 / 3) * 2)
    assert len(seen) == 1


def test_gradients_are_compressed_on_their_way_back(w: Cluster) -> None:
    seen: list[GradientBucket] = []
    with w[1]:
        handle = autograd.register_comm_hook(seen, to_half)
    assert torch.equal(gradient(), (torch.full((3,), 1 / 3) * 2).half().float())
    handle.remove()
    assert [bucket.to for bucket in seen] == ["w0"]
    assert torch.equal(gradient(), torch.full((3,), 1 / 3) * 2)


def test_every_message_of_a_pass_over_three_workers(w: Cluster) -> None:
    seen: list[GradientBucket] = []
    handles = []
    for worker in w:
        with worker:
            handles.append(autograd.register_comm_hook(seen, to_half))
    assert torch.equal(gradient(onward, 0.5), torch.full((3,), 2.0))
    for handle in handles:
        handle.remove()
    assert sorted(bucket.to for bucket in seen) == ["w0", "w1", "w1", "w2"]


def test_several_gradients_and_undefined_ones() -> None:
    seen: list[GradientBucket] = []
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.register_comm_hook(seen, to_half), autograd.context() as context_id:
        a, _ = rpc.rpc_sync("w1", twice, (x, y))
        autograd.backward(context_id, [a.sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 2.0))
    assert [g is None for g in seen[0].gradients] == [False, True]


def test_a_hook_that_leaves_the_gradients() -> None:
    seen: list[GradientBucket] = []
    with autograd.register_comm_hook(seen, list.append):
        assert torch.equal(gradient(), torch.full((3,), 1 / 3) * 2)
    assert len(seen) == 1


def test_a_pass_without_a_hook_takes_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from telegrad.autograd.passes import manager

    read: list[Any] = []
    decompress = manager.decompress

    def counted(messages: Any, callee_of: Any) -> Any:
        read.append(messages)
        return decompress(messages, callee_of)

    def is_fast() -> bool:
        read.clear()
        gradient()
        return not read

    monkeypatch.setattr(manager, "decompress", counted)
    assert any(is_fast() for _ in range(20))  # on a busy machine a reply can arrive before this thread waits for it
    with autograd.register_comm_hook([], to_half):
        assert not any(is_fast() for _ in range(5))


# ---- what goes wrong


def fails(*_: Any) -> Any:
    raise ValueError("no compression")


def fails_there(state: object, bucket: GradientBucket) -> Any:
    return fails, ()


def too_few(state: object, bucket: GradientBucket) -> Any:
    return list, ()


def no_tensor(state: object, bucket: GradientBucket) -> Any:
    return list, ([1.5],)


def no_pair(state: object, bucket: GradientBucket) -> Any:
    return bucket.gradients


BAD: list[tuple[Any, type[Exception], str]] = [
    (fails, ValueError, "no compression"),
    (fails_there, ValueError, "no compression"),
    (too_few, TypeError, "list of a communication hook returned 0 gradients for 1 gradients"),
    (no_tensor, TypeError, "list of a communication hook returned float for 1 gradients"),
    (no_pair, TypeError, "a communication hook returned a list of 1 items: return None, or a function and a tuple"),
]


@pytest.mark.parametrize(("hook", "kind", "text"), BAD)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_hook_raises_fails_the_pass(w: Cluster, hook: Any, kind: type[Exception], text: str, rank: int) -> None:
    with w[rank]:
        handle = autograd.register_comm_hook(None, hook)
    with pytest.raises(kind, match=text):
        gradient()
    handle.remove()
    assert torch.equal(gradient(), torch.full((3,), 1 / 3) * 2)


def test_a_worker_has_one_hook() -> None:
    with (
        autograd.register_comm_hook(None, to_half),
        pytest.raises(RuntimeError, match="has a communication hook already"),
    ):
        autograd.register_comm_hook(None, to_half)


async def async_hook(state: object, bucket: Any) -> None:
    return None


@pytest.mark.parametrize("hook", [None, async_hook])
def test_a_hook_that_is_no_plain_function(hook: Any) -> None:
    with pytest.raises(TypeError, match="a communication hook has to be"):
        autograd.register_comm_hook(None, hook)
    autograd.register_comm_hook(None, to_half).remove()


def test_without_a_group() -> None:
    from telegrad.testing import run_all

    with pytest.raises(RuntimeError, match="initialize distributed autograd"):
        run_all([lambda: autograd.register_comm_hook(None, to_half)])


def as_given(gradients: list[Tensor]) -> list[Tensor]:
    return gradients


MADE = {
    "half": (lambda g: g.half(), None),
    "expanded": (lambda g: g.expand(2, 3), None),
    "too short": (lambda g: g[:1], r"invalid gradient.*got \[1\].*\[3\]"),
    "other": (lambda g: torch.ones(7), r"invalid gradient.*\[7\]"),
}


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("kind", MADE)
def test_gradients_of_hooks_are_checked_where_they_arrive(w: Cluster, kind: str, leaf: bool) -> None:
    make, error = MADE[kind]
    x = torch.ones(3, requires_grad=True)
    with w[1]:
        handle = autograd.register_comm_hook(None, lambda _, bucket: (as_given, ([make(g) for g in bucket.gradients],)))
    try:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("w1", double, (x if leaf else x * 1,)).sum()
            if error is None:
                autograd.backward(context_id, [loss])
                got = autograd.get_gradients(context_id)[x]
                assert (got.dtype, got.shape) == (torch.float32, (3,))
                assert got.tolist() == [2 * (1 + (kind == "expanded"))] * 3
            else:
                with pytest.raises(RuntimeError, match=error):
                    autograd.backward(context_id, [loss])
    finally:
        handle.remove()
