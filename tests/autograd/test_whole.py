"""Large graphs that lead to what was received and to nothing else: the engine is not told where to stop."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulation import Group
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from telegrad.autograd import passes, reaching, short, stages, taking
from telegrad.autograd.engine import run_to_the_ends
from telegrad.autograd.stages import Stages

MANY = 1000


@pytest.fixture(autouse=True, params=["short", "long"])
def wholes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """For each stage that was run in that way, how many recvs it led to. On the short way of a pass, if it can, and on
    the long one."""
    found: list[int] = []

    def count(recvs: Any, *args: Any) -> Any:
        found.append(len(recvs))
        return run_to_the_ends(recvs, *args)

    for module in (short, stages):
        monkeypatch.setattr(module, "run_to_the_ends", count)
    monkeypatch.setattr(taking, "_spare", [])
    monkeypatch.setattr(reaching.vain.here, "passes", 0)
    if request.param == "long":
        monkeypatch.setattr(passes, "begin", lambda *_: None)
        monkeypatch.setattr(passes, "answer", lambda *_: None)
    yield found
    assert not taking._under_way
    assert all(call.leaf.grad is None and not call.found for call in taking._spare)


def leaf() -> Tensor:
    return torch.rand(3, requires_grad=True)


def long_way(x: Tensor) -> Tensor:
    """Doubles, in many steps that change nothing."""
    for _ in range(MANY // 2):
        x = x * 1.0 + 0.0
    return x * 2


def received(*leaves: Tensor) -> tuple[Group, list[Tensor]]:
    """What worker 1 gets of them, in one message."""
    group = Group(2, 0)
    return group, group.transfer(0, 1, leaves)


def gradient_of(group: Group, x: Tensor) -> Tensor:
    return group.contexts[0].gradients[x]


def test_under_no_grad_inference_mode_and_another_default_device(wholes: list[int]) -> None:
    x = leaf()
    group, (there,) = received(x)
    loss = long_way(there).sum()
    with torch.no_grad(), torch.device("meta"):
        group.backward(1, [loss], retain_graph=True)
    with torch.inference_mode():
        group.backward(1, [loss])
    assert wholes == [1, 1]
    assert torch.equal(gradient_of(group, x), torch.full((3,), 4.0))


def test_gradients_come_to_what_was_received(wholes: list[int]) -> None:
    group, xs = Group(3, 0), [leaf() for _ in range(4)]
    first, second = group.transfer(0, 2, xs[:2])
    (third,) = group.transfer(1, 2, xs[2:3])
    (unused,) = group.transfer(1, 2, xs[3:])
    group.backward(2, [(long_way(first * third) + second * 5).sum()])
    assert wholes == [2]
    first, second, third = xs[:3]
    assert torch.equal(group.contexts[0].gradients[first], 2 * third)
    assert torch.equal(group.contexts[0].gradients[second], torch.full((3,), 5.0))
    assert torch.equal(group.contexts[1].gradients[third], 2 * first)
    assert unused.requires_grad
    assert set(group.contexts[1].gradients) == {third}
    assert all(x.grad is None for x in xs)


def test_of_one_message_some_get_nothing(wholes: list[int]) -> None:
    x, y, z = leaf(), leaf(), leaf()
    group, (a, _, c) = received(x, y, z)
    group.backward(1, [(long_way(a) + c).sum()])
    assert wholes == [1]
    assert set(group.contexts[0].gradients) == {x, z}


def test_a_gradient_that_is_undefined_is_none(wholes: list[int]) -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, _grad: Tensor) -> None:
            return None

    x = leaf()
    group, (there,) = received(x)
    group.backward(1, [long_way(Stops.apply(there)).sum()])
    group.backward(1, [torch._C._functions.UndefinedGrad()(long_way(there)).sum()])
    assert wholes == [1]  # the second one
    assert x not in group.contexts[0].gradients


def test_what_is_reached_through_few_nodes_is_stopped_at(wholes: list[int]) -> None:
    xs = [leaf() for _ in range(100)]
    group = Group(2, 0)
    there = [group.transfer(0, 1, [x])[0] for x in xs]
    group.backward(1, [long_way(torch.stack(there)).sum()])
    assert wholes == []
    assert torch.equal(gradient_of(group, xs[7]), torch.full((3,), 2.0))


def test_leaves_keep_their_grad(wholes: list[int]) -> None:
    x, w = leaf(), leaf()
    w.grad = torch.ones(3)
    group, (there,) = received(x)
    group.backward(1, [long_way(there * w).sum()])
    assert wholes == []
    assert torch.equal(w.grad, torch.ones(3))
    assert torch.equal(group.contexts[1].gradients[w], 2 * x)


def test_functions_in_place_on_a_view_are_passed_as_ever(wholes: list[int]) -> None:
    """Torch's node for that has the Function within."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    x = leaf()
    group, (there,) = received(x)
    y = long_way(there)
    Twice.apply(y[:2])
    group.backward(1, [y.sum()])
    assert wholes == []
    assert torch.equal(gradient_of(group, x), torch.tensor([4.0, 4.0, 2.0]))


def test_reentrant_checkpoints_are_refused_here_too(wholes: list[int]) -> None:
    x, w = leaf(), leaf()
    group, (there,) = received(x)
    loss = checkpoint(lambda t: t * w, long_way(there), use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        group.backward(1, [loss])
    assert wholes == []
    assert w.grad is None


def test_the_hooks_of_what_was_received_see_its_gradient(wholes: list[int]) -> None:
    x, seen = leaf(), []
    group, (there,) = received(x)
    there.register_hook(lambda grad: (seen.append("tensor"), grad * 10)[1])
    there.grad_fn.register_hook(lambda _ins, outs: seen.append("node"))  # type: ignore[union-attr]
    there.retain_grad()
    group.backward(1, [long_way(there).sum()])
    assert wholes == [1]
    assert seen == ["tensor", "node"]
    assert torch.equal(gradient_of(group, x), torch.full((3,), 20.0))
    assert torch.equal(there.grad, torch.full((3,), 20.0))  # type: ignore[arg-type]


def test_a_graph_that_is_kept_runs_again(wholes: list[int]) -> None:
    x = leaf()
    group, (there,) = received(x)
    loss = long_way(there * there).sum()
    group.backward(1, [loss], retain_graph=True)
    group.backward(1, [loss])
    assert wholes == [1, 1]
    assert torch.equal(gradient_of(group, x), 8 * x)
    with pytest.raises(RuntimeError, match="a second time"):
        group.backward(1, [loss])


def test_what_a_hook_raises_ends_the_pass_and_nothing_more_is_taken(wholes: list[int]) -> None:
    x = leaf()
    group, (there,) = received(x)

    def fail(_: Tensor) -> None:
        raise ValueError("in a hook")

    hook = there.register_hook(fail)
    with pytest.raises(ValueError, match="in a hook"):
        group.backward(1, [long_way(there).sum()])
    hook.remove()
    assert wholes == [1]
    with pytest.raises(RuntimeError, match="goes on at another worker"):
        (there * 2).sum().backward()


def stray_backward(to: Tensor, errors: list[str]) -> Callable[..., None]:
    """A hook that runs a backward pass of its own, and keeps what that says."""

    def stray(*_: Any) -> None:
        with torch.enable_grad():
            loss = (to * 7).sum()
        try:
            loss.backward()
        except RuntimeError as error:
            errors.append(str(error))

    return stray


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["reached", "not reached"])
def test_a_plain_backward_in_a_hook_is_refused_and_takes_nothing(when: str, where: str, wholes: list[int]) -> None:
    """Whether or not the pass comes to the value that the stray one leads to."""
    x, y = leaf(), leaf()
    errors: list[str] = []
    group, (there,) = received(x)
    other = group.transfer(0, 1, [y])[0]
    strayed = there if where == "reached" else other
    last = long_way(there * 1)

    stray = stray_backward(strayed, errors)
    if when == "before":
        last.register_hook(stray)
    else:
        there.grad_fn.register_hook(stray)  # type: ignore[union-attr]
    group.backward(1, [(last + other * 0).sum()])
    assert wholes == [2]
    assert len(errors) == 1
    assert "goes on at another worker" in errors[0]
    assert torch.equal(gradient_of(group, x), torch.full((3,), 2.0))
    assert torch.equal(gradient_of(group, y), torch.zeros(3))


def test_a_plain_backward_that_alone_leads_to_a_value_is_refused(wholes: list[int]) -> None:
    """Gradients come for one of two tensors that were sent; the stray pass goes to what is behind the other one."""
    x, y = leaf(), leaf()
    errors: list[str] = []
    group = Group(3, 0)
    first, second = group.transfer(0, 1, [x])[0], group.transfer(0, 1, [y])[0]

    stray = stray_backward(second, errors)
    middle = first * 1
    middle.register_hook(stray)
    one, two = group.transfer(1, 2, [long_way(middle), long_way(second)])
    assert two.requires_grad
    group.backward(2, [one.sum()])
    assert wholes == [2]
    assert len(errors) == 1
    assert "goes on at another worker" in errors[0]
    assert set(group.contexts[0].gradients) == {x}


def test_several_sources_of_which_some_lead_to_recvs_alone(wholes: list[int]) -> None:
    """Each source is told by what itself leads to."""
    x, w = leaf(), leaf()
    w.grad = torch.ones(3)
    group = Group(3, 0)
    expected = torch.zeros(3)
    losses = []
    for number in range(6):
        (there,) = group.transfer(0, 1, [x])
        made = long_way(there) if number % 2 else long_way(there * w)
        (back,) = group.transfer(1, 2, [made])
        losses.append(back.sum())
        expected += 2 if number % 2 else 2 * w.detach()
    group.backward(2, [sum(losses, torch.zeros(()))])
    assert wholes == [1, 1, 1]
    assert torch.equal(w.grad, torch.ones(3))
    assert torch.allclose(group.contexts[0].gradients[x], expected)
    assert torch.allclose(group.contexts[1].gradients[w], 6 * x)


def test_a_pass_in_a_hook_of_another_takes_its_own(wholes: list[int]) -> None:
    x, y = leaf(), leaf()
    outer, (there,) = received(x)
    inner, (other,) = received(y)
    middle = there * 1
    loss = long_way(other * 3).sum()

    def other_pass(_: Tensor) -> None:
        inner.backward(1, [loss])

    middle.register_hook(other_pass)
    outer.backward(1, [long_way(middle).sum()])
    assert wholes == [1, 1]
    assert torch.equal(gradient_of(outer, x), torch.full((3,), 2.0))
    assert torch.equal(gradient_of(inner, y), torch.full((3,), 6.0))


def test_threads_pass_by_the_same_value_at_once(wholes: list[int]) -> None:
    """Two stages over one recv, which meet in the middle: each takes what is its own."""
    x = leaf()
    group, (there,) = received(x)
    meet = threading.Barrier(2, timeout=60)
    middle = there * 1

    def wait(_: Tensor) -> None:
        meet.wait()

    middle.register_hook(wait)
    taken: dict[int, Any] = {}
    losses = {factor: (long_way(middle) * factor).sum() for factor in (1, 100)}

    def run(factor: int) -> None:
        graph = stages.LocalGraph(
            [(0, [torch.autograd.graph.get_gradient_edge(losses[factor])])], group.contexts[1].receipts.values()
        )
        mine = Stages(group.contexts[1], graph)
        mine.retain_graph = True
        mine.add(0, [torch.ones(())])
        taken[factor] = mine.run(stages.FINAL)

    threads = [threading.Thread(target=run, args=(factor,)) for factor in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wholes == [1, 1]
    for factor, [(record, (gradient,))] in taken.items():
        assert record.node is there.grad_fn
        assert torch.equal(gradient, torch.full((3,), 2.0 * factor))


@pytest.mark.parametrize("make", [lambda x: x.to_sparse(), lambda x: x.half(), lambda x: x.to(torch.complex64)])
def test_other_kinds_of_tensors(make: Callable[[Tensor], Tensor], wholes: list[int]) -> None:
    x = leaf()
    group, (there,) = received(make(x))
    back = there.to_dense() if there.layout is torch.sparse_coo else there
    group.backward(1, [long_way(back).abs().float().sum()])
    assert wholes == [1]
    assert torch.allclose(gradient_of(group, x), torch.full((3,), 2.0))
