"""Backward passes without a context: `loss.backward()` over several workers."""

import gc
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from plain_helpers import State, grad_of, new_weight, ones, scale
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from telegrad import autograd, rpc
from telegrad.autograd.plain.records import PlainContext
from telegrad.options import Options
from telegrad.rref import RRef
from telegrad.testing import Cluster, Gate, cluster, eventually, run_all

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def group() -> Iterator[Cluster]:
    with cluster(3, options=Options(plain_backward=True)) as workers:
        yield workers


@pytest.fixture(autouse=True)
def clean(group: Cluster) -> Iterator[None]:
    State.weight = new_weight()
    yield
    State.hidden = None
    gc.collect()
    assert_forgotten(group)


def records(worker: Any) -> PlainContext:
    return cast("PlainContext", worker._worker.autograd.plain)


def assert_forgotten(group: Cluster) -> None:
    # The frames of a failed pass refer to its tensors, in a cycle.
    eventually(lambda: gc.collect() is not None and all(records(worker).is_empty for worker in group))


def twice_scaled(x: Tensor) -> Tensor:
    return 2 * rpc.rpc_sync("w2", scale, (x,))


def square(x: Tensor) -> Tensor:
    return x * x


def test_graphs_that_are_kept_for_peers_are_shown(group: Cluster) -> None:
    held = rpc.rpc_sync("w1", scale, (ones(),))
    assert group[1].debug_info().kept_graphs == 1
    assert "1 graphs kept for peers" in str(group[1].debug_info())
    del held
    eventually(lambda: group[1].debug_info().kept_graphs == 0)


# ---- the slide


def test_slide() -> None:
    x = torch.zeros(2, requires_grad=True)
    fut = rpc.rpc_async("w1", torch.add, args=(x, 1))
    rref = rpc.remote("w2", torch.add, args=(x, fut.wait()))
    rref.to_here().sum().backward()
    assert grad_of(x) == [2, 2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.relu = nn.ReLU()
        nn.init.ones_(self.fc.weight)
        nn.init.ones_(self.fc.bias)

    def forward(self, rx: RRef[Tensor]) -> Tensor:
        return cast("Tensor", self.relu(self.fc(rx.to_here())))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rb1 = rpc.remote("w1", Block)
        self.rb2 = rpc.remote("w2", Block)

    def forward(self, ri: RRef[Tensor]) -> RRef[Tensor]:
        rx = self.rb1.remote().forward(ri)
        return cast("RRef[Tensor]", self.rb2.remote().forward(rx))


def gradients(part: RRef[nn.Module]) -> list[Any]:
    return [grad_of(parameter) for parameter in part.local_value().parameters()]


def test_model_of_the_slide() -> None:
    i, j = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    m = Model()
    m(RRef(i)).to_here().sum().backward()
    local = [Block(), Block()]
    y = j
    for block in local:
        y = block.relu(block.fc(y))
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert grad_of(i) == grad_of(j)
    for rref, block in zip((m.rb1, m.rb2), local, strict=True):
        ours = rpc.rpc_sync(rref.owner(), gradients, (rref,))
        assert ours == [grad_of(parameter) for parameter in block.parameters()]


# ---- the semantics of a local pass


def test_gradients_accumulate_and_meet_local_ones() -> None:
    x = ones()
    for count in (1, 2):
        h = 3 * x  # sent, and used locally as well: its node runs once, on the sum
        calls: list[Any] = []
        h.register_hook(lambda grad, calls=calls: calls.append(grad.tolist()))  # type: ignore[misc]
        y = rpc.rpc_sync("w1", scale, (h,))
        (y.sum() + h.sum()).backward()
        assert calls == [[2, 3, 4]]
        assert grad_of(x) == [6 * count, 9 * count, 12 * count]
        assert grad_of(State.weight) == [3 * count] * 3


def test_chain_over_workers() -> None:
    x = ones()
    rpc.rpc_sync("w1", twice_scaled, (x,)).sum().backward()
    assert grad_of(x) == [2, 4, 6]
    assert grad_of(State.weight) == [2, 2, 2]


def test_retain_graph() -> None:
    x = ones()
    y = rpc.rpc_sync("w1", square, (2 * x,))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert grad_of(x) == [16, 16, 16]
    with pytest.raises(RuntimeError, match="backward through the graph a second time") as raised:
        y.sum().backward()
    assert "w1" in str(raised.value)


def scalar(x: Tensor) -> Tensor:
    return (State.weight * x).sum()


def test_a_reference_as_root() -> None:
    x = ones()
    rref = rpc.remote("w1", scalar, (x,))
    rref.backward(retain_graph=True)
    rref.backward()
    assert grad_of(x) == [2, 4, 6]
    assert grad_of(State.weight) == [2, 2, 2]
    rpc.RRef(rpc.rpc_sync("w1", scalar, (x,))).backward()  # of the owner
    assert grad_of(x) == [3, 6, 9]


def test_grad() -> None:
    x, other = ones(), ones()
    h = 2 * x
    y = rpc.rpc_sync("w1", scale, (h,))
    for _ in range(2):
        found = torch.autograd.grad(y.sum(), [x, h, y], retain_graph=True)
        assert [grad.tolist() for grad in found] == [[2, 4, 6], [1, 2, 3], [1, 1, 1]]
    assert torch.autograd.grad(y.sum(), [y])[0].tolist() == [1, 1, 1]  # without the other worker
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(y.sum(), [x, other], retain_graph=True)
    assert torch.autograd.grad(y.sum(), [x, other], allow_unused=True)[1] is None
    assert grad_of(x) is None
    assert grad_of(State.weight) is None


def test_backward_with_inputs() -> None:
    x, other = ones(), ones()
    h = x * other
    y = rpc.rpc_sync("w1", scale, (h,))
    with pytest.raises(RuntimeError, match="accumulates only into leaves"):
        y.sum().backward(inputs=[h])
    y.sum().backward(inputs=[x])
    assert grad_of(x) == [1, 2, 3]
    assert grad_of(other) is None
    assert grad_of(State.weight) is None


def test_create_graph_is_refused() -> None:
    y = rpc.rpc_sync("w1", scale, (ones(),))
    with pytest.raises(RuntimeError, match=r"create_graph=True is not supported over several workers.*w1"):
        y.sum().backward(create_graph=True)


def test_transforms_are_refused() -> None:
    x = ones()
    y = rpc.rpc_sync("w1", scale, (x,))
    with pytest.raises(RuntimeError, match=r"is_grads_batched=True.* not supported over several workers.*w1"):
        torch.autograd.grad(y, [x], torch.eye(3), is_grads_batched=True)
    assert torch.autograd.grad(y, [y], torch.eye(3), is_grads_batched=True)[0].tolist() == torch.eye(3).tolist()

    def f(x: Tensor) -> Tensor:
        return rpc.rpc_sync("w1", scale, (x,)).sum()

    for transform in (torch.func.grad(f), torch.func.vmap(f), torch.func.jacrev(f)):
        with pytest.raises(RuntimeError, match=r"transform \(grad, vmap, jacrev, \.\.\.\) cannot be sent"):
            transform(torch.ones(3))
    assert torch.func.grad(lambda x: (x * y).sum())(torch.ones(3)).tolist() == [1, 2, 3]  # here no gradient is sent


def test_hooks_run_once_with_the_sum() -> None:
    leaf = ones()
    sums: list[Any] = []
    leaf.register_hook(lambda grad: sums.append(grad.tolist()))
    leaf.register_post_accumulate_grad_hook(lambda tensor: sums.append(grad_of(tensor)))  # type: ignore[no-untyped-call]
    y, z = rpc.rpc_sync("w1", scale, (leaf,)), rpc.rpc_sync("w2", scale, (leaf,))
    (y.sum() + z.sum() + leaf.sum()).backward()
    assert sums == [[3, 5, 7], [3, 5, 7]]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    x = ones()
    rpc.rpc_sync("w1", scale, (checkpoint(torch.square, x, use_reentrant=reentrant),)).sum().backward()
    assert grad_of(x) == [2, 4, 6]


def test_several_trainers_lose_no_gradient(group: Cluster) -> None:
    passes = 50

    def train(rank: int) -> None:
        with group[rank]:
            for _ in range(passes):
                rpc.rpc_sync("w1", scale, (torch.ones(3),)).sum().backward()

    run_all([lambda rank=rank: train(rank) for rank in (0, 2, 0, 2)])  # type: ignore[misc]
    assert grad_of(State.weight) == [4 * passes] * 3


def gradient_in(context: int) -> Any:
    return autograd.get_gradients(context)[State.weight].tolist()


def train_in_a_context(x: Tensor) -> Any:
    with autograd.context() as context:
        h = x * 2
        y = rpc.rpc_sync("w0", scale, (h,))
        z = rpc.rpc_sync("w2", scale, (h,))
        autograd.backward(context, [(y + x).sum() + z.sum()])
        return autograd.get_gradients(context)[x].tolist()


def test_an_argument_is_a_leaf_for_the_contexts_of_its_handler() -> None:
    x = ones()
    assert rpc.rpc_sync("w1", train_in_a_context, (x,)) == [5, 9, 13]
    assert grad_of(x) is None


def test_contexts_and_plain_passes_do_not_mix() -> None:
    y = rpc.rpc_sync("w1", scale, (torch.ones(3),))
    with autograd.context() as context:
        z = rpc.rpc_sync("w1", scale, (torch.ones(3),))
        autograd.backward(context, [z.sum()])
        assert grad_of(State.weight) is None
        assert rpc.rpc_sync("w1", gradient_in, (context,)) == [1, 1, 1]
        z = rpc.rpc_sync("w1", scale, (torch.ones(3),))
        autograd.backward(context, [(y * z).sum()], retain_graph=True)  # y is a leaf for the context
        assert autograd.get_gradients(context)[y].tolist() == [1, 2, 3]
        assert grad_of(State.weight) is None
        with pytest.raises(RuntimeError, match="received in another autograd context"):
            (y * z).sum().backward()
        with pytest.raises(RuntimeError, match="Leave it before"), autograd.plain():
            pass
    y.sum().backward()
    assert grad_of(State.weight) == [1, 1, 1]


def test_plain_mode_of_a_thread() -> None:
    with cluster(2) as group:
        with autograd.plain():
            y = rpc.rpc_sync("w1", scale, (torch.ones(3),))
            with autograd.context() as context:
                autograd.backward(context, [rpc.rpc_sync("w1", scale, (torch.ones(3),)).sum()])
            rpc.remote("w1", scalar, (torch.zeros(3),)).backward()
        assert rpc.rpc_sync("w1", scale, (torch.ones(3),)).is_leaf  # not recorded
        with pytest.raises(RuntimeError, match=r"autograd\.plain\(\).*rref\.to_here\(\)\.sum\(\)\.backward\(\)"):
            rpc.remote("w1", scalar, (torch.zeros(3),)).backward()
        y.sum().backward()
        assert grad_of(State.weight) == [1, 1, 1]
        del y
        assert_forgotten(group)


# ---- failures


def fail(_: Tensor) -> Tensor:
    raise ValueError("of a hook")


def wait(gradient: Tensor) -> None:
    State.gate.enter(gradient)


def hooked(x: Tensor, hook: Any) -> Tensor:
    y = State.weight * x
    y.register_hook(hook)
    return y


def test_error_on_another_worker() -> None:
    with pytest.raises(ValueError, match="of a hook"):
        rpc.rpc_sync("w1", hooked, (ones(), fail)).sum().backward()


def test_deadline(group: Cluster) -> None:
    State.gate = Gate()
    y = rpc.rpc_sync("w1", hooked, (torch.ones(3), wait))
    calls = cast("Any", group[0])._worker.calls
    before, calls.default_timeout = calls.default_timeout, 50_000_000
    try:
        with pytest.raises(RuntimeError, match="a backward pass without a context"):
            y.sum().backward()
    finally:
        calls.default_timeout = before
        State.gate.open()


def test_lost_worker() -> None:
    with cluster(2, options=Options(plain_backward=True)) as group:
        y = rpc.rpc_sync("w1", scale, (ones(),))
        group[1].shutdown(graceful=False)
        with pytest.raises(RuntimeError, match="w1"):
            y.sum().backward()
        eventually(lambda: not records(group[0]).sends)


# ---- the lifetime of records


def test_passes_of_a_new_process() -> None:
    """The process has the id of its predecessor, which may have late messages."""
    options = Options(plain_backward=True, rpc_timeout=20)
    with cluster(2, options, dynamic=True) as two:
        for _ in range(2):
            with two[1]:
                for _ in range(3):
                    x = ones()
                    rpc.rpc_sync("w0", torch.sum, (x * 2,)).backward()
                    assert grad_of(x) == [2, 2, 2]
            two[1].shutdown()
            two.workers[1] = rpc.Worker("w1", options=options, store=two.store)


def test_a_late_message_of_a_lost_worker_begins_no_pass() -> None:
    """Nothing would end the pass here."""
    with cluster(2, Options(plain_backward=True), dynamic=True) as two:
        with two[1]:
            rpc.rpc_sync("w0", torch.sum, (ones(),)).backward()
        passes, plain = two[0]._worker.autograd.passes, records(two[0])
        number = two[1]._worker.autograd.passes._last_number + 1
        two.workers.pop().shutdown()
        eventually(lambda: 1 in two[0]._worker.members.lost)
        assert passes._pass_of(plain, 1, number, 0, 0) is None
        assert plain.passes == {}


def test_nothing_is_recorded_without_grad_mode(group: Cluster) -> None:
    with torch.no_grad():
        rpc.rpc_sync("w1", scale, (ones(),))
    assert all(not records(worker).sends for worker in group)


def keep_hidden(x: Tensor) -> None:
    State.hidden = State.weight * x


def use_hidden() -> tuple[Tensor, Tensor]:
    assert State.hidden is not None
    return State.hidden * 3, State.hidden * 5


def test_some_collected_outputs_of_a_message(group: Cluster) -> None:
    x = ones()
    rpc.rpc_sync("w1", keep_hidden, (x,))
    y, z = rpc.rpc_sync("w1", use_hidden)
    del y
    gc.collect()
    z.sum().backward()
    assert grad_of(x) == [5, 10, 15]
    assert records(group[1]).receipts  # of x: the worker keeps the graph


def test_sender_forgets(group: Cluster) -> None:
    x = ones()
    for _ in range(500):
        rpc.rpc_sync("w1", twice_scaled, (x,)).sum()
    assert_forgotten(group)


class Undecodable:
    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise ValueError("cannot be decoded")


def undecodable(x: Tensor) -> object:
    return x * State.weight, Undecodable()


def test_sender_forgets_what_cannot_be_decoded(group: Cluster) -> None:
    with pytest.raises(ValueError, match="cannot be decoded"):
        rpc.rpc_sync("w1", undecodable, (ones(),))
    assert_forgotten(group)


def late(x: Tensor) -> Tensor:
    return cast("Tensor", State.gate.enter(x * State.weight))


def test_sender_forgets_a_late_reply(group: Cluster) -> None:
    State.gate = Gate()
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("w1", late, (ones(),), timeout=0.05)
    State.gate.open()
    assert_forgotten(group)
