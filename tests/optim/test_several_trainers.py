"""Several trainers of one server's parameters: the guarantees of docs/optim.md."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parameter_server_helpers import Descent, Server, serve, train
from torch import Tensor, nn, optim

from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer, between_steps
from telegrad.optim import owner as on_owner
from telegrad.optim.local import LocalOptimizer
from telegrad.rpc import RRef
from telegrad.testing import Cluster, Gate, assert_quiescent, cluster, eventually, run_all

TIMEOUT = 10.0


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    """Start the server w0 and the trainers w1 to w4."""
    with cluster(5) as group:
        yield group


# ---- the stress test

OPTIMIZERS: list[list[tuple[Any, dict[str, Any], bool]]] = [  # of each trainer: class, arguments, sparse gradients
    [(optim.SGD, {"lr": 0.01}, False), (optim.SparseAdam, {"lr": 0.001}, True)],
    [(optim.Adam, {"lr": 0.001}, False), (optim.SGD, {"lr": 0.01}, True)],
    [(optim.SGD, {"lr": 0.01, "momentum": 0.5}, False), (optim.SGD, {"lr": 0.01}, True)],
    [(Descent, {"lr": 0.01}, False), (Descent, {"lr": 0.01}, True)],
]


def train_all(w: Cluster, steps: int) -> None:
    server: RRef[Server] = w[1].remote("w0", serve)

    def trainer(rank: int) -> int:
        if rank == 0:
            return 0
        mine = w[rank].rpc_sync("w1", passed_on, (shared,)) if rank != 1 else server
        optimizers = [
            DistributedOptimizer(cls, mine.rpc_sync().parameters(sparse), **arguments)
            for cls, arguments, sparse in OPTIMIZERS[rank - 1]
        ]
        return train(mine, optimizers, rank, steps)

    shared = _Shared(server)
    examined = w.on_each(trainer, timeout=50.0 + steps)
    assert examined == [0] + [-(-steps // 5)] * 4
    shared.forget()


class _Shared:
    """Share a reference of one worker with the others."""

    of: RRef[Any] | None = None

    def __init__(self, rref: RRef[Any]) -> None:
        _Shared.of = rref

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("shared",)

    @staticmethod
    def forget() -> None:
        _Shared.of = None


def passed_on(_: Any) -> RRef[Any]:
    assert _Shared.of is not None
    return _Shared.of


def test_four_trainers(w: Cluster) -> None:
    train_all(w, 40)
    for worker in w:
        assert_quiescent(worker)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_four_trainers_for_long(w: Cluster) -> None:
    train_all(w, 1000)
    for worker in w:
        assert_quiescent(worker)


# ---- each guarantee


class Holder:
    """Parameter on the server, with calls that tests can block."""

    def __init__(self, value: float = 1.0) -> None:
        self.weight = nn.Parameter(torch.full((3,), value))
        self.other = nn.Parameter(torch.full((3,), value))

    def parameters(self) -> list[RRef[nn.Parameter]]:
        return [RRef(self.weight), RRef(self.other)]

    def square(self) -> Tensor:
        return (self.weight * self.weight).sum()

    def sum(self) -> Tensor:
        return (self.weight + self.other).sum()

    def twice(self, gate: Gate) -> tuple[Tensor, bool]:
        """Read all parameters before and after a pause."""
        before = self.weight.detach().clone(), self.other.detach().clone()
        result = (self.weight * self.other).sum()
        gate.enter()
        after = self.weight.detach(), self.other.detach()
        return result, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    def wait(self, gate: Gate) -> Tensor:
        gate.enter()
        return self.square()

    async def coroutine(self, inside: Gate) -> Tensor:
        """Compute before and after an await."""
        first = self.weight * self.weight
        inside.entered.release()
        while not inside.is_open():
            await asyncio.sleep(0.001)
        return (first * self.other).sum()

    @rpc.functions.async_execution
    def later(self, inside: Gate) -> Any:
        """Compute in a callback."""
        return rpc.rpc_async("w3", inside.enter, (2.0,)).then(
            lambda done: (self.weight * self.weight * done.wait()).sum()
        )

    def values(self) -> Tensor:
        return self.weight.detach()

    def gradients(self, context_id: int) -> Tensor | None:
        return autograd.get_gradients(context_id).get(self.weight)


@pytest.fixture
def holder(w: Cluster) -> RRef[Holder]:
    return w[0].rref(Holder(3.0))


def proxied(w: Cluster, rank: int, holder: RRef[Holder]) -> RRef[Holder]:
    """Return the same reference, as another worker has it."""
    _Shared.of = holder
    return w[rank].rpc_sync("w0", passed_on, (0,))


def step_of(w: Cluster, rank: int, holder: RRef[Holder], optimizer: DistributedOptimizer) -> None:
    """Make a step of a trainer, with gradients of 1."""
    with w[rank], autograd.context() as context_id:
        autograd.backward(context_id, [proxied(w, rank, holder).rpc_sync().sum()])
        optimizer.step(context_id)


def optimizer_on(w: Cluster, rank: int, holder: RRef[Holder], cls: Any = optim.SGD) -> DistributedOptimizer:
    with w[rank]:
        return DistributedOptimizer(cls, proxied(w, rank, holder).rpc_sync().parameters(), lr=1.0)


@pytest.mark.parametrize("cls", [optim.SGD, Descent])
def test_a_step_between_forward_and_backward(w: Cluster, holder: RRef[Holder], cls: Any) -> None:
    optimizer = optimizer_on(w, 2, holder, cls)
    with w[1], autograd.context() as context_id:
        mine = proxied(w, 1, holder)
        y = mine.rpc_sync().square()
        for _ in range(3):
            step_of(w, 2, holder, optimizer)
        autograd.backward(context_id, [y])
        assert torch.equal(mine.rpc_sync().gradients(context_id), torch.full((3,), 6.0))
        again = mine.rpc_sync().square()
        assert again.item() == 0.0
        autograd.backward(context_id, [again])  # of the weights as they are now, 0, so it adds 0
        assert torch.equal(mine.rpc_sync().gradients(context_id), torch.full((3,), 6.0))


def test_no_step_becomes_visible_while_a_handler_runs(w: Cluster, holder: RRef[Holder]) -> None:
    optimizer = optimizer_on(w, 2, holder)
    gate = Gate()
    with w[1], autograd.context() as context_id:
        future = proxied(w, 1, holder).rpc_async().twice(gate)
        gate.wait_for()

        def step() -> None:
            step_of(w, 2, holder, optimizer)

        def release() -> None:
            step_gate = w[0]._worker.attachments["autograd.protection"].gate
            eventually(lambda: step_gate.waiting, what="a step that waits")
            assert torch.equal(holder.local_value().weight, torch.full((3,), 3.0))
            gate.open()

        run_all([step, release])
        result, same = future.wait()
        assert same
        assert result.item() == 27.0
        autograd.backward(context_id, [result])
    assert torch.equal(holder.local_value().weight, torch.full((3,), 2.0))


def test_no_step_is_lost(w: Cluster, holder: RRef[Holder]) -> None:
    optimizers = {rank: optimizer_on(w, rank, holder, (optim.SGD, Descent)[rank % 2]) for rank in range(1, 5)}

    def trainer(rank: int) -> None:
        if rank:
            for _ in range(20):
                step_of(w, rank, holder, optimizers[rank])

    w.on_each(trainer)
    assert torch.equal(holder.local_value().weight, torch.full((3,), 3.0 - 80))


def test_parameters_of_the_trainer_itself(w: Cluster) -> None:
    """A context's body runs on the owner of parameters that another worker steps."""
    mine = Holder(3.0)
    holder = w[1].rref(mine)
    optimizer = optimizer_on_owner(w, 2, holder)
    with w[1], autograd.context() as context_id:
        y = mine.square()
        with w[2], autograd.context() as other:
            _Shared.of = holder
            theirs = w[2].rpc_sync("w1", passed_on, (0,))
            autograd.backward(other, [theirs.rpc_sync().sum()])
            optimizer.step(other)
        assert torch.equal(mine.weight, torch.full((3,), 2.0))
        autograd.backward(context_id, [y])
        assert torch.equal(autograd.get_gradients(context_id)[mine.weight], torch.full((3,), 6.0))


def optimizer_on_owner(w: Cluster, rank: int, holder: RRef[Holder]) -> DistributedOptimizer:
    _Shared.of = holder
    with w[rank]:
        theirs = w[rank].rpc_sync("w1", passed_on, (0,))
        return DistributedOptimizer(optim.SGD, theirs.rpc_sync().parameters(), lr=1.0)


@pytest.mark.parametrize("name", ["coroutine", "later"])
def test_deferred_handlers(w: Cluster, holder: RRef[Holder], name: str) -> None:
    optimizer = optimizer_on(w, 2, holder)
    inside = Gate()
    with w[1], autograd.context() as context_id:
        mine = proxied(w, 1, holder)
        future = getattr(mine.rpc_async(), name)(inside)
        inside.wait_for()
        step_of(w, 2, holder, optimizer)
        inside.open()
        y = future.wait()
        step_of(w, 2, holder, optimizer)
        autograd.backward(context_id, [y])
        # The coroutine squares 3, and multiplies by 2 after a step; the callback squares 2, and doubles that.
        assert y.item() == {"coroutine": 54.0, "later": 24.0}[name]
        expected = {"coroutine": 12.0, "later": 8.0}[name]
        assert torch.equal(mine.rpc_sync().gradients(context_id), torch.full((3,), expected))


def test_a_handler_that_waits_for_the_step_that_waits_for_it(
    w: Cluster, holder: RRef[Holder], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = optimizer_on(w, 2, holder)
    monkeypatch.setattr(w[0]._worker.attachments["autograd.protection"].gate, "max_wait", 0.1)
    gate = Gate()
    with w[1], autograd.context() as context_id, caplog.at_level(logging.WARNING, "telegrad"):
        mine = proxied(w, 1, holder)
        future = mine.rpc_async().twice(gate)
        gate.wait_for()
        step_of(w, 2, holder, optimizer)  # the handler goes on when this has returned
        gate.open()
        y, same = future.wait()
        assert not same
        autograd.backward(context_id, [y])
        assert torch.equal(mine.rpc_sync().gradients(context_id), torch.full((3,), 3.0))
    assert "took effect while 1 handlers of other contexts ran" in caplog.text


def test_a_handler_that_steps_its_own_context(w: Cluster) -> None:
    """A server that drives the training itself does not deadlock, however deep."""
    assert w[1].rpc_sync("w2", drive, ("w0",), timeout=TIMEOUT) == 2.0


def drive(server: str) -> float:
    holder = rpc.remote(server, Holder, (3.0,))
    optimizer = DistributedOptimizer(optim.SGD, holder.rpc_sync().parameters(), lr=1.0)
    with autograd.context() as context_id:
        rpc.rpc_sync(server, nested, (holder, optimizer.remote_optimizers[0], context_id))
    value: float = holder.rpc_sync().values()[0].item()
    return value


def nested(holder: RRef[Holder], part: RRef[Any], context_id: int) -> None:
    """Run on the server in the context: forward, backward, a third worker's step."""
    autograd.backward(context_id, [holder.local_value().sum()])
    rpc.rpc_sync("w3", step_from_elsewhere, (part, context_id))


def step_from_elsewhere(part: RRef[Any], context_id: int) -> None:
    from telegrad.optim.owner import step_of as step_part

    rpc.rpc_sync(part.owner(), step_part, (*part.id, context_id))


def test_between_steps(w: Cluster, holder: RRef[Holder]) -> None:
    optimizer = optimizer_on(w, 2, holder)
    weight = holder.local_value().weight
    with w[0], between_steps():
        gate = w[0]._worker.attachments["autograd.protection"].gate
        eventually(lambda: gate.handlers == 1)  # handlers before have left it
        assert torch.equal(weight, torch.full((3,), 3.0))
    step_of(w, 2, holder, optimizer)
    eventually(lambda: not gate.handlers)
    assert torch.equal(weight, torch.full((3,), 2.0))


# ---- options


def part_at(worker: Any, optimizer: DistributedOptimizer) -> LocalOptimizer:
    (part,) = optimizer.remote_optimizers
    found = worker._worker.references.owned(part.id).get()
    assert isinstance(found, LocalOptimizer)
    return found


@pytest.mark.parametrize("function", [on_owner.step_of, on_owner.state_of])
def test_options_do_not_change_during_another_step(w: Cluster, holder: RRef[Holder], function: Any) -> None:
    optimizer = optimizer_on(w, 1, holder)
    part, (reference,) = part_at(w[0], optimizer), optimizer.remote_optimizers
    arguments = (*reference.id, *([None] if function is on_owner.step_of else []), [(0, {"lr": 0.5})])
    with part.exclusive():  # as a step of another trainer
        with pytest.raises(TimeoutError):
            w[1].rpc_sync("w0", function, arguments, timeout=0.2)
        assert part.optimizer.param_groups[0]["lr"] == 1.0


def step_with(optimizer: DistributedOptimizer, rate: float) -> None:
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def test_options_of_an_optimizer_that_was_sent(w: Cluster, holder: RRef[Holder]) -> None:
    optimizer = optimizer_on(w, 1, holder)
    part = part_at(w[0], optimizer)
    with w[1]:
        rpc.rpc_sync("w2", step_with, (optimizer, 0.5))
        assert part.optimizer.param_groups[0]["lr"] == 0.5
        optimizer.step()
        assert part.optimizer.param_groups[0]["lr"] == 1.0
