"""Optimizers of parameters on several workers, with a single trainer."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import telegrad.optim
from telegrad import autograd, rpc
from telegrad.errors import WorkerLost
from telegrad.optim import DistributedOptimizer
from telegrad.optim.local import LocalOptimizer
from telegrad.rpc import RRef
from telegrad.testing import Cluster, Gate, assert_quiescent, cluster, eventually


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    with cluster(3) as group:
        yield group


class Layer:
    """A weight and what is done with it."""

    def __init__(self, value: float, requires_grad: bool = True) -> None:
        self.weight = torch.full((2, 2), value, requires_grad=requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x

    def get(self) -> Tensor:
        return self.weight


class FailsHere(optim.SGD):
    """Optimizer that fails in `step`, differently on each worker."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        name = rpc.get_worker_info().name
        raise {"w1": KeyError, "w2": ValueError}.get(name, LookupError)(f"on {name}")


class CannotBeMade(optim.SGD):
    def __init__(self, params: Any) -> None:
        raise ValueError(f"no optimizer on {rpc.get_worker_info().name}")


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def layers(*workers: str) -> list[RRef[Layer]]:
    return [rpc.remote(worker, Layer, (float(number + 1),)) for number, worker in enumerate(workers)]


def weights(of: list[RRef[Layer]]) -> list[RRef[Tensor]]:
    return [layer.remote().get() for layer in of]


def train_step(of: list[RRef[Layer]], optimizer: DistributedOptimizer) -> None:
    with autograd.context() as context_id:
        x = X
        for layer in of:
            x = layer.rpc_sync().forward(x)
        autograd.backward(context_id, [x.sum()])
        optimizer.step(context_id)


def train_here(values: list[float], make: Any, steps: int) -> list[Tensor]:
    ws = [torch.full((2, 2), value, requires_grad=True) for value in values]
    optimizer = make(ws)
    for _ in range(steps):
        x = X
        for weight in ws:
            x = weight @ x
        optimizer.zero_grad()
        x.sum().backward()
        optimizer.step()
    return ws


CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (optim.Adagrad, {"lr": 0.05}),
    (optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (optim.SGD, {"lr": 1e-3, "momentum": 1, "weight_decay": 1, "nesterov": True}),
    (optim.RMSprop, {"lr": 0.05}),
    (optim.NAdam, {"lr": 0.05}),  # torch's has no script for this one
]


@pytest.mark.parametrize(("cls", "kwargs"), CLASSES, ids=lambda v: v.__name__ if isinstance(v, type) else "")
@pytest.mark.parametrize("places", [("w1", "w2"), ("w0", "w1"), ("w1", "w1"), ("w0", "w0")], ids="-".join)
@pytest.mark.usefixtures("w")
def test_results_equal_one_local_optimizer(cls: Any, kwargs: dict[str, Any], places: tuple[str, str]) -> None:
    of = layers(*places)
    optimizer = DistributedOptimizer(cls, weights(of), **kwargs)
    assert len(optimizer.remote_optimizers) == len(set(places))
    for _ in range(3):
        train_step(of, optimizer)
    expected = train_here([1.0, 2.0], lambda ws: cls(ws, **kwargs), 3)
    for layer, one in zip(of, expected, strict=True):
        assert torch.equal(layer.rpc_sync().get(), one)


@pytest.mark.usefixtures("w")
def test_groups() -> None:
    of = layers("w1", "w2", "w1")
    first, second, third = weights(of)
    groups = [{"params": [first, second], "lr": 0.5}, {"params": third}]
    optimizer = DistributedOptimizer(optim.SGD, groups, lr=0.25)
    train_step(of, optimizer)

    def make(ws: list[Tensor]) -> optim.SGD:
        return optim.SGD([{"params": ws[:2], "lr": 0.5}, {"params": ws[2]}], lr=0.25)

    for layer, one in zip(of, train_here([1.0, 2.0, 3.0], make, 1), strict=True):
        assert torch.equal(layer.rpc_sync().get(), one)


def names_of(optimizer: RRef[Any]) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.local_value().optimizer.param_groups]


@pytest.mark.usefixtures("w")
def test_names() -> None:
    a, b = weights(layers("w1", "w1"))
    (made,) = DistributedOptimizer(optim.SGD, [("a", a), ("b", b)], lr=1.0).remote_optimizers
    assert rpc.rpc_sync("w1", names_of, (made,)) == [["a", "b"]]


@pytest.mark.usefixtures("w")
def test_positional_arguments_and_none_at_all() -> None:
    of = layers("w1")
    train_step(of, DistributedOptimizer(optim.SGD, weights(of), 0.5))
    assert torch.equal(of[0].rpc_sync().get(), train_here([1.0], lambda ws: optim.SGD(ws, 0.5), 1)[0])
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        DistributedOptimizer(optim.SGD, [], lr=1.0)


@pytest.mark.usefixtures("w")
def test_a_class_with_a_step_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(TypeError, match="LBFGS has a step that needs closure: DistributedOptimizer takes every class"):
        DistributedOptimizer(optim.LBFGS, weights(layers("w1")))


@pytest.mark.usefixtures("w")
def test_parameters_without_a_gradient_are_unchanged() -> None:
    used, unused = layers("w1", "w2")
    frozen = rpc.remote("w2", Layer, (5.0, False))
    optimizer = DistributedOptimizer(optim.SGD, weights([used, unused, frozen]), lr=0.5, weight_decay=0.1)
    train_step([used], optimizer)
    assert not torch.equal(used.rpc_sync().get(), torch.full((2, 2), 1.0))
    assert torch.equal(unused.rpc_sync().get(), torch.full((2, 2), 2.0))
    assert torch.equal(frozen.rpc_sync().get(), torch.full((2, 2), 5.0))


def grad_of(layer: RRef[Layer]) -> Tensor | None:
    return layer.local_value().weight.grad


def with_grad(layer: RRef[Layer]) -> None:
    layer.local_value().weight.grad = torch.full((2, 2), 9.0)


@pytest.mark.usefixtures("w")
def test_grad_is_not_touched() -> None:
    of = layers("w1")
    rpc.rpc_sync("w1", with_grad, (of[0],))
    train_step(of, DistributedOptimizer(optim.SGD, weights(of), lr=0.5))
    assert torch.equal(rpc.rpc_sync("w1", grad_of, (of[0],)), torch.full((2, 2), 9.0))


# ---- what goes wrong


@pytest.mark.usefixtures("w")
def test_a_context_that_has_ended() -> None:
    optimizer = DistributedOptimizer(optim.SGD, weights(layers("w1")), lr=0.5)
    with autograd.context() as context_id:
        pass
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        optimizer.step(context_id)


@pytest.mark.usefixtures("w")
def test_errors_of_all_owners_arrive() -> None:
    of = layers("w1", "w2", "w0")
    optimizer = DistributedOptimizer(FailsHere, weights(of), lr=1.0)
    with pytest.raises(KeyError) as caught:  # and it is a ValueError, too
        train_step(of[:2], optimizer)
    error = caught.value
    assert "on w1" in str(error)
    assert "on w2" in str(error)


@pytest.mark.usefixtures("w")
def test_errors_of_two_owners_are_one_group() -> None:
    of = layers("w1", "w2")
    optimizer = DistributedOptimizer(FailsHere, weights(of), lr=1.0)
    with pytest.raises(ValueError, match=r"step failed on 2 workers: w1: KeyError.*; w2: ValueError") as caught:
        train_step(of, optimizer)
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, ExceptionGroup)
    assert len(caught.value.exceptions) == 2


@pytest.mark.usefixtures("w")
def test_an_optimizer_that_cannot_be_created() -> None:
    with pytest.raises(ValueError, match=r"\(CannotBeMade\) failed on 2 workers(.|\n)*on w1(.|\n)*on w2"):
        DistributedOptimizer(CannotBeMade, weights(layers("w1", "w2")))
    with pytest.raises(ValueError, match="no optimizer on w1"):
        DistributedOptimizer(CannotBeMade, weights(layers("w1")))


@pytest.mark.usefixtures("w")
def test_invalid_arguments() -> None:
    with pytest.raises(TypeError, match=r"takes RRefs to parameters, but got a Tensor.*pass RRef\(parameter\)"):
        DistributedOptimizer(optim.SGD, [torch.ones(1)], lr=1.0)
    with pytest.raises(TypeError, match='a parameter group is a dict with "params"'):
        DistributedOptimizer(optim.SGD, [{"lr": 1.0}])
    both = weights(layers("w1", "w0"))
    with pytest.raises(TypeError, match='the "params" of a group are a set'):
        DistributedOptimizer(optim.SGD, [{"params": set(both)}])
    for mixed in ([("a", both[0]), both[1]], [both[0], ("b", both[1])]):
        with pytest.raises(ValueError, match="some have no name: name all of a group, or none"):
            DistributedOptimizer(optim.SGD, mixed)
    with pytest.raises(TypeError, match="takes RRefs to parameters, but got a tuple"):
        DistributedOptimizer(optim.SGD, [("a", "b", both[0])])
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        DistributedOptimizer(optim.SGD, [RRef(torch.ones(1, requires_grad=True) * 2)], lr=1.0)


def test_without_a_group() -> None:
    from telegrad.testing import run_all

    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        run_all([lambda: DistributedOptimizer(optim.SGD, [], lr=1.0)])


def test_a_lost_owner_is_named() -> None:
    with cluster(3, graceful=False) as group:
        of = layers("w1", "w2")
        optimizer = DistributedOptimizer(optim.SGD, weights(of), lr=1.0)
        group.workers.pop().shutdown(graceful=False)
        with autograd.context() as context_id, pytest.raises(WorkerLost, match=r"worker w2( is lost)?: it shut down"):
            optimizer.step(context_id)


@pytest.mark.parametrize("left", ["w1", "w2", "w3"])
def test_an_owner_that_has_left_is_named_and_the_others_step(left: str) -> None:
    with cluster(4, dynamic=True, graceful=False) as group:
        parameters = weights(layers("w1", "w2", "w3"))
        optimizer = DistributedOptimizer(optim.SGD, parameters, lr=1.0)
        for parameter in parameters:
            rpc.rpc_sync(parameter.owner(), give_gradient, (parameter,))
        stayed = [parameter for parameter in parameters if parameter.owner_name() != left]
        before = [parameter.to_here().detach().clone() for parameter in stayed]
        next(worker for worker in group if worker.info.name == left).shutdown()
        with pytest.raises(WorkerLost, match=rf"worker {left}( is lost)?: it (shut down|left)"):
            optimizer.step()
        for parameter, value in zip(stayed, before, strict=True):
            assert torch.equal(parameter.to_here(), value - 1)


def give_gradient(parameter: RRef[Tensor]) -> None:
    value = parameter.local_value()
    value.grad = torch.ones_like(value)


# ---- a group that cannot be added


gates: list[Gate] = []
"""The gate of the running test, at which `WaitsToAdd` waits."""


class WaitsToAdd(optim.SGD):
    """Optimizer that waits at a gate on w1, if there is one, before it adds a group."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if gates and rpc.get_worker_info().name == "w1":
            gates[0].enter()
        super().add_param_group(param_group)


def rates_at(part: RRef[LocalOptimizer]) -> list[float]:
    return [group["lr"] for group in part.local_value().optimizer.param_groups]


def rates(optimizer: DistributedOptimizer) -> list[list[float]]:
    """Return the learning rates that each owner has."""
    return [rpc.rpc_sync(part.owner(), rates_at, (part,)) for part in optimizer.remote_optimizers]


def not_a_leaf() -> Tensor:
    return torch.ones(2, 2, requires_grad=True) * 2


@pytest.mark.usefixtures("w")
def test_a_group_that_one_owner_refuses_is_added_by_none() -> None:
    of, more = layers("w0", "w1", "w2"), layers("w0", "w1", "w2")
    optimizer = DistributedOptimizer(optim.SGD, weights(of), lr=0.5, momentum=0.9)
    bad = {"params": [*weights(more[::2]), rpc.remote("w1", not_a_leaf)], "lr": 5.0}
    for _ in range(2):
        with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor") as caught:
            optimizer.add_param_group(bad)
        assert not getattr(caught.value, "__notes__", [])
    assert len(optimizer.param_groups) == 1
    assert rates(optimizer) == [[0.5]] * 3
    for layer in more:
        rpc.rpc_sync(layer.owner(), with_grad, (layer,))
    optimizer.step()
    assert all(torch.equal(layer.rpc_sync().get(), torch.full((2, 2), n + 1.0)) for n, layer in enumerate(more))
    optimizer.add_param_group({"params": weights(more), "lr": 5.0})  # the owners have none of them
    optimizer.param_groups[1]["lr"] = 0.25
    optimizer.step()
    assert rates(optimizer) == [[0.5, 0.25]] * 3
    assert all(torch.equal(layer.rpc_sync().get(), torch.full((2, 2), n - 1.25)) for n, layer in enumerate(more))
    assert [group["params"] for group in optimizer.state_dict()["param_groups"]] == [[0, 1, 2], [3, 4, 5]]


def test_an_owner_that_adds_a_group_too_late_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, undo = Gate(), LocalOptimizer.undo_add
    undone: list[str] = []

    def open_and_undo(self: LocalOptimizer, *args: Any) -> None:
        gate.open()  # the owner is still adding the group
        undo(self, *args)
        undone.append(rpc.get_worker_info().name)

    with cluster(3, rpc.Options(rpc_timeout=2)):
        of = layers("w1", "w2")
        optimizer = DistributedOptimizer(WaitsToAdd, weights(of), lr=0.5)
        group = {"params": weights(layers("w1", "w2")), "lr": 5.0}
        monkeypatch.setitem(globals(), "gates", [gate])
        monkeypatch.setattr(LocalOptimizer, "undo_add", open_and_undo)
        text = r"\(DistributedOptimizer.add_param_group on w1; running\). Give init_rpc's options a larger rpc_timeout"
        with pytest.raises(TimeoutError, match=text):
            optimizer.add_param_group(group)
        assert sorted(undone) == ["w1", "w2"]
        assert rates(optimizer) == [[0.5], [0.5]]
        optimizer.add_param_group(group)
        assert rates(optimizer) == [[0.5, 5.0], [0.5, 5.0]]
        del of, group, optimizer


@pytest.mark.usefixtures("w")
def test_adding_a_group_waits_for_other_steps_until_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2, rpc.Options(rpc_timeout=5)):
        optimizer = DistributedOptimizer(optim.SGD, weights(layers("w1")), lr=0.5)
        timeouts: list[float] = []
        exclusive = LocalOptimizer.exclusive

        def recorded(self: LocalOptimizer, timeout: float = -1.0, chain: int = 0) -> Any:
            timeouts.append(timeout)
            return exclusive(self, timeout, chain)

        monkeypatch.setattr(LocalOptimizer, "exclusive", recorded)
        optimizer.add_param_group({"params": weights(layers("w1"))})
        assert len(timeouts) == 1
        assert 0 < timeouts[0] <= 5


def test_an_optimizer_whose_owner_keeps_a_failed_group_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("no undo")

    optimizer = DistributedOptimizer(optim.SGD, weights(layers("w1", "w2")), lr=0.5)
    state = optimizer.state_dict()
    bad: dict[str, Any] = {"params": [rpc.remote("w1", not_a_leaf)]}
    monkeypatch.setattr(LocalOptimizer, "undo_add", fail)
    with pytest.raises(ValueError, match="non-leaf") as caught:
        optimizer.add_param_group(bad)
    text = "can no longer be used: add_param_group failed, and removing the group again from worker w1 failed"
    assert text in caught.value.__notes__[0]
    uses: list[Any] = [optimizer.step, optimizer.zero_grad, optimizer.state_dict]
    uses += [lambda: optimizer.load_state_dict(state), lambda: optimizer.add_param_group(bad)]
    uses += [lambda: optimizer.step(uses.clear), lambda: rpc.rpc_sync("w2", DistributedOptimizer.step, (optimizer,))]
    for use in uses:
        with pytest.raises(RuntimeError, match=text):
            use()


def test_a_group_with_a_lost_owner_is_removed_from_the_others() -> None:
    with cluster(3, graceful=False) as group:
        optimizer = DistributedOptimizer(optim.SGD, weights(layers("w1", "w2")), lr=0.5)
        more = weights(layers("w1", "w2"))
        group.workers.pop().shutdown(graceful=False)
        with pytest.raises(WorkerLost, match="worker w2") as caught:
            optimizer.add_param_group({"params": more, "lr": 5.0})
        assert not getattr(caught.value, "__notes__", [])
        optimizer.add_param_group({"params": more[:1], "lr": 0.25})
        assert rpc.rpc_sync("w1", rates_at, (optimizer.remote_optimizers[0],)) == [0.5, 0.25]


# ---- what is left


def test_a_deleted_optimizer_leaks_nothing(w: Cluster) -> None:
    of = layers("w1", "w0")
    train_step(of, DistributedOptimizer(optim.Adam, weights(of)))
    del of
    for worker in w:
        assert_quiescent(worker)
        gc.collect()  # a handler's frames may hold the last of them in a circle
        eventually(lambda worker=worker: not worker._worker.attachments.get("optim.parameters"))  # type: ignore[misc]


# ---- what else the package offers


def test_the_rest_of_torchs_package_exists() -> None:
    import torch.distributed.optim as theirs

    for name in theirs.__all__:
        ours = getattr(telegrad.optim, name)
        assert name in telegrad.optim.__all__
        assert ours is DistributedOptimizer if name == "DistributedOptimizer" else ours is getattr(theirs, name)
    assert telegrad.optim._FunctionalSGD is theirs._FunctionalSGD

    class Own(optim.SGD):
        pass

    telegrad.optim.register_functional_optim(Own, nn.Module)
    try:
        assert telegrad.optim.functional_optim_map[Own] is nn.Module
    finally:
        del telegrad.optim.functional_optim_map[Own]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        telegrad.optim.nothing  # noqa: B018


def test_importing_it_does_not_import_torchs() -> None:
    look = "import sys, telegrad.optim, telegrad.nn; print([m for m in sys.modules if 'distributed.optim' in m])"
    shown = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.strip() == "[]"
