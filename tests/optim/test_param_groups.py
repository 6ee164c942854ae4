"""A distributed optimizer as one of torch: groups, schedulers, hooks, `.grad`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from model_helpers import Local, Spread, assert_equal, batch, grads_of, set_grads
from torch import nn, optim
from torch.optim import lr_scheduler

from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer
from telegrad.testing import Cluster, assert_quiescent, cluster


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    with cluster(3) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "w" in request.fixturenames:
        for worker in request.getfixturevalue("w"):
            assert_quiescent(worker)


MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("cls", [optim.SGD, optim.AdamW])
@pytest.mark.usefixtures("w")
def test_schedulers_do_what_they_do_locally(name: str, cls: Any) -> None:
    kwargs = MOMENTUM if cls is optim.SGD else {"lr": 0.1}
    model, local = Spread(), Local()
    both: list[tuple[Any, Any]] = [
        (model, DistributedOptimizer(cls, model.groups(), **kwargs)),
        (local, cls(local.groups(), **kwargs)),
    ]
    rates: list[list[Any]] = []
    for one, optimizer in both:
        scheduler = SCHEDULERS[name](optimizer)
        seen = []
        for number in range(8):
            loss = one.train(optimizer, number)
            scheduler.step(*([loss] if name == "ReduceLROnPlateau" else []))
            seen.append([(g["lr"], g.get("momentum"), g.get("betas")) for g in optimizer.param_groups])
        rates.append(seen)
    assert rates[0] == rates[1]
    if name not in ("ConstantLR", "ReduceLROnPlateau"):
        assert len({str(rate) for rate in rates[0]}) > 1
    assert_equal(model, local)


def test_every_scheduler_of_torch_is_tested() -> None:
    bases = {"LRScheduler", "_LRScheduler"}
    every = {
        n for n, v in vars(lr_scheduler).items() if isinstance(v, type) and issubclass(v, lr_scheduler.LRScheduler)
    }
    assert every - bases == set(SCHEDULERS)


@pytest.mark.usefixtures("w")
def test_a_rate_that_is_a_tensor() -> None:
    """Schedulers change it in place."""
    model, local = Spread(), Local()
    lr: Any = torch.tensor(0.1)
    ours = DistributedOptimizer(optim.Adam, model.parameters(), lr=lr)
    theirs = optim.Adam(local.parameters(), lr=lr.clone())
    for one, optimizer in ((model, ours), (local, theirs)):
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in range(4):
            one.train(optimizer, number)  # type: ignore[attr-defined]
            scheduler.step()
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert_equal(model, local)


@pytest.mark.usefixtures("w")
@pytest.mark.parametrize("how", ["by name", "by place", "of the group"])
def test_a_rate_that_is_a_tensor_stays_the_object_of_the_program(how: str) -> None:
    model, rate = Spread(), torch.tensor(0.1)
    params = model.parameters()
    if how == "of the group":
        ours = DistributedOptimizer(optim.SGD, [{"params": params, "lr": rate}], lr=torch.tensor(9.0))
    else:
        args, kwargs = ((rate,), {}) if how == "by place" else ((), {"lr": rate})
        ours = DistributedOptimizer(optim.SGD, params, *args, **kwargs)
        assert ours.defaults["lr"] is rate
    assert ours.param_groups[0]["lr"] is rate
    before = model.values()
    rate.zero_()
    model.train(ours, 0)
    assert all(torch.equal(one, other) for one, other in zip(before, model.values(), strict=True))


@pytest.mark.usefixtures("w")
def test_groups_are_those_of_a_local_optimizer() -> None:
    model, local = Spread(), Local()
    ours = DistributedOptimizer(optim.AdamW, model.groups(), lr=0.1)
    theirs = optim.AdamW(local.groups(), lr=0.1)
    assert isinstance(ours, optim.Optimizer)
    assert ours.defaults == theirs.defaults
    for mine, expected in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in expected.items() if k != "params"}
        assert len(mine["params"]) == len(expected["params"])
    references = model.groups()[0]["params"]
    assert [one.to_here().shape for one in ours.param_groups[0]["params"]] == [p.to_here().shape for p in references]
    assert "lr: 0.05" in repr(ours)


@pytest.mark.usefixtures("w")
def test_options_of_one_group_are_changed() -> None:
    model, local = Spread(), Local()
    ours: Any = DistributedOptimizer(optim.SGD, model.groups(), **MOMENTUM)
    theirs: Any = optim.SGD(local.groups(), **MOMENTUM)
    for one, optimizer in ((model, ours), (local, theirs)):
        one.train(optimizer, 0)  # type: ignore[attr-defined]
        optimizer.param_groups[1].update(lr=0.3, weight_decay=0.5, momentum=0.1)
        one.train(optimizer, 1)  # type: ignore[attr-defined]
        optimizer.param_groups[0]["lr"] = 0.0
        one.train(optimizer, 2)  # type: ignore[attr-defined]
    assert_equal(model, local)


@pytest.mark.usefixtures("w")
def test_a_change_is_sent_once_and_only_to_owners_with_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Spread()
    first, second = (module.remote_parameters() for module in model.layers)
    optimizer = DistributedOptimizer(optim.SGD, [{"params": first}, {"params": second}], lr=0.1)
    sent = recorded_requests(monkeypatch)
    model.train(optimizer, 0)
    optimizer.param_groups[1]["lr"] = 0.2
    model.train(optimizer, 1)
    model.train(optimizer, 2)
    assert [[args[1:] for _, args, _ in requests.values()] for requests in sent] == [
        [(), ()],
        [(), ([(0, {"lr": 0.2})],)],
        [(), ()],
    ]


def recorded_requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, Any]]:
    """Record the requests of the optimizer; each has one message per owner."""
    from telegrad.optim import ask as module

    sent: list[dict[int, Any]] = []

    def ask(what: str, requests: Any) -> list[Any]:
        sent.append(dict(requests))
        return module.ask(what, requests)

    for name in ("distributed", "clipping"):
        monkeypatch.setattr(f"telegrad.optim.{name}.ask", ask)
    return sent


@pytest.mark.usefixtures("w")
@pytest.mark.parametrize("method", ["step", "state_dict"])
def test_options_are_sent_again_after_a_failure(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner sets options before it fails: their old values have to be sent."""
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    for module in model.layers:
        rpc.rpc_sync(module.on, set_grads, (module.module_rref, 1.0))
    before = model.values()
    optimizer.param_groups[0]["lr"] = "bad"
    monkeypatch.setattr(optim.SGD, "state_dict", _fail)
    with pytest.raises((TypeError, ValueError)):
        getattr(optimizer, method)()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    for old, new in zip(before[::2], model.values()[::2], strict=True):
        torch.testing.assert_close(new, old - 0.1)


def _fail(_: Any) -> dict[str, Any]:
    raise ValueError("no state")


@pytest.mark.usefixtures("w")
def test_a_group_is_added() -> None:
    model, local = Spread(("w1", "w2", "w1")), Local(3)
    a, b, c = (module.remote_parameters() for module in model.layers)
    d, e, f = (list(module.parameters()) for module in local.layers)
    ours: Any = DistributedOptimizer(optim.SGD, a, **MOMENTUM)
    theirs: Any = optim.SGD(d, **MOMENTUM)
    for one, optimizer, groups in ((model, ours, (b, c)), (local, theirs, (e, f))):
        one.train(optimizer, 0)  # type: ignore[attr-defined]
        optimizer.add_param_group({"params": groups[0], "lr": 0.01})
        one.train(optimizer, 1)  # type: ignore[attr-defined]
        optimizer.add_param_group({"params": groups[1]})
        optimizer.param_groups[0]["lr"] = 0.2
        optimizer.param_groups[2]["lr"] = 0.3
        one.train(optimizer, 2)  # type: ignore[attr-defined]
    assert_equal(model, local)
    assert {k: [g[k] for g in ours.param_groups] for k in ("lr", "momentum")} == {
        k: [g[k] for g in theirs.param_groups] for k in ("lr", "momentum")
    }
    with pytest.raises(ValueError, match="more than one parameter group"):
        ours.add_param_group({"params": [ours.param_groups[0]["params"][0]]})
    with pytest.raises(TypeError, match='a parameter group is a dict with "params"'):
        ours.add_param_group(a)
    removed = ours.param_groups[0].pop("params")
    ours.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match="references of a group cannot be changed"):
        ours.step()
    ours.param_groups[0]["params"] = removed


@pytest.mark.usefixtures("w")
def test_hooks_before_and_after_a_step() -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    seen: list[Any] = []
    before = optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", o is optimizer)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", args[1:])))
    with autograd.context() as context_id:
        optimizer.step(context_id)
    before.remove()
    optimizer.step()
    assert seen == [("before", True), ("after", (context_id,)), ("after", ())]


# ---- .grad


@pytest.mark.usefixtures("w")
def test_a_step_without_a_context_uses_grad() -> None:
    model, local = Spread(), Local()
    ours = DistributedOptimizer(optim.SGD, model.parameters(), **MOMENTUM)
    theirs = optim.SGD(local.parameters(), **MOMENTUM)
    for number in range(3):
        for module, mine in zip(model.layers, local.layers, strict=True):
            rpc.rpc_sync(module.on, set_grads, (module.module_rref, number))
            for place, parameter in enumerate(mine.parameters()):
                parameter.grad = torch.full_like(parameter, number + place)
        ours.step()
        theirs.step()
    assert_equal(model, local)
    assert grads(model)[0] is not None
    ours.zero_grad(set_to_none=False)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads(model) if grad is not None)
    ours.zero_grad()
    assert grads(model) == [None] * 4
    ours.zero_grad()
    before = model.values()
    ours.step()  # without gradients
    assert all(torch.equal(a, b) for a, b in zip(model.values(), before, strict=True))


def set_grad(layer: Any, kind: str) -> None:
    weight = layer.local_value().weight
    if kind == "view":
        weight.grad = torch.ones(20)[:16].view(4, 4)
    else:  # as after a backward pass with create_graph=True
        weight.grad = weight * 2 if kind == "graph" else torch.ones(4, 4, requires_grad=True)


def grad_of(layer: Any) -> tuple[Any, bool]:
    grad = layer.local_value().weight.grad
    return grad.detach(), grad.requires_grad


@pytest.mark.usefixtures("w")
@pytest.mark.parametrize("kind", ["view", "graph", "leaf"])
def test_gradients_of_all_kinds_are_set_to_zero(kind: str) -> None:
    layer = Spread(("w1",)).layers[0]
    optimizer = DistributedOptimizer(optim.SGD, layer.remote_parameters(), lr=0.1)
    rpc.rpc_sync("w1", set_grad, (layer.module_rref, kind))
    optimizer.zero_grad(set_to_none=False)
    grad, requires_grad = rpc.rpc_sync("w1", grad_of, (layer.module_rref,))
    assert torch.equal(grad, torch.zeros(4, 4))
    assert not requires_grad


def grads(model: Spread) -> list[Any]:
    return [g for module in model.layers for g in rpc.rpc_sync(module.on, grads_of, (module.module_rref,))]


@pytest.mark.usefixtures("w")
def test_a_closure_is_called_once() -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=1.0)
    called = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        called.append(1)
        for module in model.layers:
            rpc.rpc_sync(module.on, set_grads, (module.module_rref, 0.0))
        return 0.5

    before = model.values()
    with torch.no_grad():
        assert optimizer.step(closure) == 0.5
        assert optimizer.step(closure=closure) == 0.5
    assert called == [1, 1]
    for value, (place, old) in zip(model.values(), enumerate(before), strict=True):
        assert torch.equal(value, old - place % 2 - place % 2)


@pytest.mark.usefixtures("w")
def test_accumulation_over_contexts_is_that_of_local_passes() -> None:
    model, local = Spread(("w1", "w0", "w2")), Local(3)
    ours = DistributedOptimizer(optim.AdamW, model.parameters(), lr=0.1)
    theirs = optim.AdamW(local.parameters(), lr=0.1)
    for round_ in range(3):
        for number in range(4):
            with autograd.context() as context_id:
                autograd.backward(context_id, [model.loss(batch(4 * round_ + number)) / 4])
                ours.accumulate(context_id)
                assert not rpc.rpc_sync("w1", autograd.get_gradients, (context_id,))
            (local.loss(batch(4 * round_ + number)) / 4).backward()  # type: ignore[no-untyped-call]
        ours.step()
        ours.zero_grad()
        theirs.step()
        theirs.zero_grad()
    assert_equal(model, local)
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        ours.accumulate(context_id)


class Table(nn.Embedding):
    def grad(self) -> Any:
        return self.weight.grad


@pytest.mark.usefixtures("w")
def test_sparse_gradients_are_accumulated() -> None:
    table = rpc.remote("w1", Table, (5, 2), {"sparse": True})
    weight = rpc.rpc_sync("w1", weight_of, (table,))
    optimizer = DistributedOptimizer(optim.SGD, [weight], lr=1.0)
    before = weight.to_here().clone()
    for _ in range(2):
        with autograd.context() as context_id:
            autograd.backward(context_id, [table.rpc_sync().forward(torch.tensor([1, 1, 3])).sum()])
            optimizer.accumulate(context_id)
    optimizer.step()
    expected = torch.zeros(5, 2)
    expected[1], expected[3] = 4, 2
    torch.testing.assert_close(weight.to_here(), before - expected)


def weight_of(table: Any) -> Any:
    return rpc.RRef(table.local_value().weight)


# ---- variants


@pytest.mark.parametrize("variant", [{"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
@pytest.mark.usefixtures("w")
def test_variants_give_the_results_of_the_plain_one(cls: Any, variant: dict[str, bool]) -> None:
    model, plain, local = Spread(), Spread(), Local()
    ours = DistributedOptimizer(cls, model.parameters(), lr=0.05, **variant)
    without = DistributedOptimizer(cls, plain.parameters(), lr=0.05, foreach=False)
    theirs = cls(local.parameters(), lr=0.05, **variant)
    for number in range(4):
        model.train(ours, number)
        plain.train(without, number)
        local.train(theirs, number)
    assert_equal(model, local)
    for value, expected in zip(model.values(), plain.values(), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.usefixtures("w")
def test_a_variant_that_the_owner_does_not_have() -> None:
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        DistributedOptimizer(optim.Adam, Spread().parameters(), fused=True, foreach=True)


# ---- what goes wrong


def test_a_scheduler_of_a_dead_owner() -> None:
    with cluster(3, graceful=False) as group:
        model = Spread()
        optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        model.train(optimizer, 0)
        scheduler.step()
        group.workers.pop().shutdown(graceful=False)
        for ask in (optimizer.step, optimizer.zero_grad, optimizer.state_dict):
            with pytest.raises(RuntimeError, match=r"worker w2( is lost)?: it shut down"):
                ask()  # type: ignore[operator]
        scheduler.step()  # changes the rate here
        with pytest.raises(RuntimeError, match=r"worker w2( is lost)?: it shut down"):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.usefixtures("w")
def test_an_optimizer_is_sent() -> None:
    model, local = Spread(("w1", "w1")), Local()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    lr_scheduler.StepLR(optimizer, 1)
    rpc.rpc_sync("w2", step_there, (optimizer, [module.module_rref for module in model.layers]))
    for module in local.layers:
        for place, parameter in enumerate(module.parameters()):
            with torch.no_grad():
                parameter.sub_(0.5 * (1 + place))
    assert_equal(model, local)


def step_there(optimizer: DistributedOptimizer, modules: list[Any]) -> None:
    for module in modules:
        rpc.rpc_sync(module.owner(), set_grads, (module, 1.0))
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
