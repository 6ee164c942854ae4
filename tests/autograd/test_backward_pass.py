"""Messages, gradients and hooks of a backward pass over simulated workers."""

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest
import torch
from simulated_group import Group
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from telegrad.autograd.context import Context
from telegrad.autograd.execution.stages import StageRunner


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape or (3,), dtype=torch.float64).requires_grad_()


def called(group: Group, x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x * weight` at worker 1, called by worker 0."""
    (there,) = group.transfer(0, 1, [x])
    (back,) = group.transfer(1, 0, [there * weight])
    return back


# ---- the messages -------------------------------------------------------------------------------------------------


def test_a_call_takes_two_messages() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    assert group.backward(0, [called(group, x, w).sum()]) == 2
    assert torch.equal(group.contexts[0].gradients[x], w)
    assert torch.equal(group.contexts[1].gradients[w], x)


def test_an_unused_value_needs_no_message() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    used, unused = called(group, x, w), called(group, x, w)
    assert group.backward(0, [used.sum()]) == 2 + 2  # the end is sent, because both replies used the same parameter
    assert torch.equal(group.contexts[1].gradients[w], x)
    assert unused.requires_grad


def test_a_local_graph() -> None:
    group, x = Group(1, 0), leaf()
    assert group.backward(0, [(x * 2).sum()]) == 0
    assert torch.equal(group.contexts[0].gradients[x], torch.full_like(x, 2))


def test_a_call_to_oneself_takes_no_message() -> None:
    group, x = Group(1, 0), leaf()
    (y,) = group.transfer(0, 0, [x * 2])
    (z,) = group.transfer(0, 0, [y * y])
    assert group.backward(0, [z.sum()]) == 0
    assert torch.equal(group.contexts[0].gradients[x], 8 * x)


def test_the_local_graph_is_released() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    (there,) = group.transfer(0, 1, [x])
    product = there * w
    seen = weakref.ref(product)
    (back,) = group.transfer(1, 0, [product])
    del product, there
    group.backward(0, [back.sum()])
    assert all(not part.holds_graph and part.is_idle for part in group.passes.values())
    gc.collect()
    assert seen() is None


# ---- gradients ----------------------------------------------------------------------------------------------------


def test_gradients_share_no_memory() -> None:
    """Scaling one in place changes no other; strides are the leaf's, as for `.grad`."""
    group = Group(2, 0)
    a, b, c = leaf(2, 3), leaf(2, 3), leaf(3, 2)
    there = group.transfer(0, 1, [a, b, c])
    (back,) = group.transfer(1, 0, [there[0] + there[1] + there[2].t()])
    group.backward(0, [back.sum() + (a + b).sum()])
    gradients = group.contexts[0].gradients
    for x in (a, b, c):
        before = {y: gradients[y].clone() for y in (a, b, c)}
        gradients[x].mul_(3)
        assert all(torch.equal(gradients[y], before[y] * (3 if y is x else 1)) for y in (a, b, c))
        assert gradients[x].stride() == x.stride()


@pytest.mark.parametrize("others", [0, 1])
def test_a_uniquely_owned_gradient_is_not_copied(others: int) -> None:
    """Gradients come from the engine at worker 1 and from a message at worker 0."""
    made: list[int] = []
    group, x, w = Group(2, 0), leaf(4), leaf(4)

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            result = grad * 2
            made.append(result.data_ptr())
            return result

    def note(src: int, dst: int, message: Any) -> None:
        if src == 1 and message[0] == 0:
            made.extend(t.data_ptr() for t in message[4])

    group.on_send = note
    group.copies = False
    y = leaf(4)
    there, too = group.transfer(0, 1, [x, y])
    for _ in range(others):
        group.transfer(1, 0, [leaf() * 2])
    (reply,) = group.transfer(1, 0, [there * Noted.apply(w) * too])  # type: ignore[operator]
    group.backward(0, [reply.sum()])
    landed = {**group.contexts[0].gradients, **group.contexts[1].gradients}
    assert set(landed) == {x, y, w}
    assert {grad.data_ptr() for grad in landed.values()} == set(made)


def test_a_gradient_that_arrives_for_a_leaf_is_not_copied() -> None:
    group, w, x = Group(2, 0), leaf(4), leaf(4)
    arrived: list[int] = []

    def note(src: int, dst: int, message: Any) -> None:
        if src == 0:
            arrived.extend(t.data_ptr() for t in message[4])

    group.on_send = note
    group.copies = False
    (there,) = group.transfer(1, 0, [w])
    group.backward(0, [(there * x.detach()).sum()])
    assert [group.contexts[1].gradients[w].data_ptr()] == arrived


@pytest.mark.parametrize("through", ["engine", "message"])
def test_a_gradient_that_a_hook_keeps_is_copied(through: str) -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    group.copies = False
    kept: list[Tensor] = []
    (w if through == "engine" else x).register_hook(kept.append)
    group.backward(0, [called(group, x, w).sum()])
    gradients = group.contexts[1 if through == "engine" else 0].gradients
    (gradient,) = gradients.values()
    before = gradient.clone()
    kept[0].zero_()
    assert torch.equal(gradient, before)


def test_sources_are_ordered_by_their_ids() -> None:
    """Threads may record them in any order; sums have this one."""
    group, x = Group(2, 0), leaf()
    for _ in range(3):
        group.transfer(0, 1, [x * 2])
    context = group.contexts[0]
    ids = sorted(context.sends)
    context.sends = {number: context.sends[number] for number in reversed(ids)}
    assert list(StageRunner(context).open().bits) == ids


def test_two_passes_add_up() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    loss = called(group, x, w).sum()
    group.backward(0, [loss], retain_graph=True)
    first = group.contexts[0].gradients[x]
    group.backward(0, [loss])
    assert torch.equal(group.contexts[0].gradients[x], 2 * w)
    assert torch.equal(first, w), "what was read before does not change"
    with pytest.raises(RuntimeError, match="retain_graph"):
        group.backward(0, [loss])


def test_roots_of_which_one_depends_on_the_other() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    y = called(group, x, w)
    group.backward(0, [y.sum(), y.sum(), (x * 3).sum()])
    assert torch.equal(group.contexts[0].gradients[x], 2 * w + 3)


def test_sparse_and_dense_parts_of_one_leaf() -> None:
    group, table = Group(2, 0), leaf(4, 3)
    rows = torch.nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)
    (there,) = group.transfer(0, 1, [rows])
    (dense,) = group.transfer(0, 1, [table * 2])
    (back,) = group.transfer(1, 0, [there.sum() + dense.sum()])
    group.backward(0, [back])
    expected = torch.full((4, 3), 2.0, dtype=torch.float64)
    expected[1] += 2
    assert torch.equal(group.contexts[0].gradients[table], expected)


def test_a_sparse_gradient_stays_sparse() -> None:
    group, table = Group(2, 0), leaf(100, 3)
    rows = torch.nn.functional.embedding(torch.tensor([1, 7]), table, sparse=True)
    (there,) = group.transfer(0, 1, [rows])
    group.backward(1, [there.sum()])
    assert group.contexts[0].gradients[table].is_sparse


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])  # those that torch can add up
def test_leaves_of_sparse_layouts(layout: torch.layout) -> None:
    values = torch.eye(3, dtype=torch.float64)
    group, x = Group(2, 0), values.to_sparse(layout=layout).requires_grad_()
    for _ in range(2):
        (there,) = group.transfer(0, 1, [x])
        (back,) = group.transfer(1, 0, [(there.to_dense() * 3).sum()])
        group.backward(0, [back])
    gradient = group.contexts[0].gradients[x]
    assert gradient.layout is layout
    assert torch.equal(gradient.to_dense(), values * 6)


def test_an_undefined_gradient_is_none() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    group, x, w = Group(2, 0), leaf(), leaf()
    (there,) = group.transfer(0, 1, [x])
    group.backward(1, [Nothing.apply(there).sum() + w.sum()])  # type: ignore[union-attr]
    assert x not in group.contexts[0].gradients
    assert w in group.contexts[1].gradients


def test_a_value_of_another_context_is_rejected() -> None:
    group, other, x = Group(2, 0), Group(2, 1), leaf()
    (there,) = other.transfer(0, 1, [x])
    with pytest.raises(RuntimeError, match="another autograd context"):
        group.backward(1, [there.sum()])
    (mine,) = group.transfer(0, 1, [x])
    group.transfer(1, 0, [there * 2])  # is not used
    group.backward(1, [mine.sum()])
    assert x in group.contexts[0].gradients


# ---- hooks ----------------------------------------------------------------------------------------------------------


def test_hooks_get_the_complete_gradient_once() -> None:
    """A residual around a call: part of x's gradient precedes that of the call."""
    group, x, w = Group(2, 0), leaf(), leaf()
    seen: list[Tensor] = []
    inner = x * 2
    inner.register_hook(lambda grad: seen.append(grad.clone()))
    x.register_hook(lambda grad: seen.append(grad.clone()))
    y = called(group, inner, w)
    group.backward(0, [(y + inner).sum()])
    assert len(seen) == 2
    assert torch.equal(seen[0], w + 1)
    assert torch.equal(seen[1], 2 * (w + 1))
    assert torch.equal(group.contexts[0].gradients[x], 2 * (w + 1))


def test_post_accumulate_hooks_read_grad() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    w.grad = torch.full_like(w, 5)
    seen: list[Tensor] = []

    def see(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    w.register_post_accumulate_grad_hook(see)
    loss = called(group, x, w).sum()
    group.backward(0, [loss], retain_graph=True)
    group.backward(0, [loss])
    assert torch.equal(seen[0], x)
    assert torch.equal(seen[1], 2 * x)
    assert torch.equal(group.contexts[1].gradients[w], 2 * x)
    assert torch.equal(w.grad, torch.full_like(w, 5))


def test_a_post_accumulate_hook_may_clear_grad() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()

    def use_up(parameter: Tensor) -> None:
        parameter.grad = None

    w.register_post_accumulate_grad_hook(use_up)
    group.backward(0, [called(group, x, w).sum()])
    assert w not in group.contexts[1].gradients
    assert w.grad is None


def test_reentrant_checkpoints_raise_with_advice() -> None:
    group, x = Group(2, 0), leaf()
    (there,) = group.transfer(0, 1, [x])
    loss = checkpoint(lambda t: t * t, there, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        group.backward(1, [loss])


# ---- many at once, and large -----------------------------------------------------------------------------------------


def test_contexts_at_once_over_the_same_parameters() -> None:
    """Threads have separate groups; the workers share parameters, one with hooks."""
    shared = [leaf(8, 8) for _ in range(4)]
    shared[0].register_hook(lambda grad: grad * 2)
    shared[1].register_post_accumulate_grad_hook(lambda parameter: None)
    errors: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            for turn in range(25):
                group, x = Group(2, seed * 100 + turn), leaf(8, 8)
                (there,) = group.transfer(0, 1, [x])
                for parameter in shared:
                    there = there + parameter * x.detach()
                (back,) = group.transfer(1, 0, [there])
                group.backward(0, [back.sum()])
                for number, parameter in enumerate(shared):
                    expected = x.detach() * (2 if number == 0 else 1)
                    assert torch.equal(group.contexts[1].gradients[parameter], expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert all(parameter.grad is None for parameter in shared)


@pytest.mark.parametrize("path", ["fast", "schedule"])
def test_graphs_deeper_than_torch_can_free(path: str) -> None:
    """The test runs in a separate process, since a failure would end it."""
    program = """
        import gc, sys, threading
        sys.path.insert(0, sys.argv[1])
        import torch
        from simulated_group import Group
        from telegrad.autograd.graph.local_graph import LocalGraph
        if sys.argv[2] == "schedule":
            LocalGraph.single_peer = LocalGraph.leads_back = lambda *_: None
        threading.stack_size(1 << 20)
        for messages in (1, 2):
            x = torch.ones(1).requires_grad_()
            group = Group(2, 0)
            (there,) = group.transfer(0, 1, [x])
            for _ in range(20_000):
                there = there + x
            back = [t for _ in range(messages) for t in group.transfer(1, 0, [there])]
            group.backward(0, [sum(t.sum() for t in back)])
            print(group.contexts[1].gradients[x].item())
            kept = [group, there, back]
            del group, there, back
            thread = threading.Thread(target=lambda: (kept.clear(), gc.collect()))
            thread.start()
            thread.join()
        """
    where = str(__file__).rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), where, path],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["20000.0", "40000.0"]


def test_later_recordings_do_not_change_a_pass() -> None:
    """A send recorded after the pass began does not belong to it."""
    group, x, w = Group(2, 0), leaf(), leaf()
    number = group.begin(0, [called(group, x, w).sum()])
    group.deliver()
    group.transfer(1, 0, [w * 2])
    group.settle()
    group.result(number)
    assert isinstance(group.contexts[1], Context)
    assert torch.equal(group.contexts[1].gradients[w], x)


def test_a_root_without_stages_left_is_not_idle() -> None:
    group = Group(3, 0)
    leaves = [torch.rand(3, requires_grad=True) for _ in range(2)]
    (one,), (two,) = (group.transfer(at, 0, [leaf * 2]) for at, leaf in enumerate(leaves, 1))
    number = group.begin(0, [(one + two).sum()])
    root = group.passes[0, number]
    assert not root.holds_graph
    assert not root.is_idle
    group.settle()
    group.result(number)
    assert root.is_idle
