"""Clipping and scaling of gradients over several workers.

The file is longer than others, because both share their models and gradients.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from model_helpers import Local, Spread, assert_equal, grads_of, set_grads
from test_param_groups import Table, recorded_requests, weight_of
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_ as clip_locally

from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer, GradScaler, clip_grad_norm_
from telegrad.optim.gradients import unscale
from telegrad.optim.local import LocalOptimizer
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


PLACES = ("w1", "w0", "w2")


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_norms_and_steps_are_those_of_one_process(norm_type: float, max_norm: float) -> None:
    model, local = Spread(PLACES), Local(3)
    ours = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    theirs = optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    norms: list[list[Tensor]] = [[], []]
    for number in range(3):
        model.train(
            ours, number, lambda o, context_id: norms[0].append(clip_grad_norm_(o, max_norm, norm_type, context_id))
        )
        local.train(theirs, number, lambda *_: norms[1].append(clip_locally(local.parameters(), max_norm, norm_type)))
    assert norms[0] == norms[1]
    assert_equal(model, local)


def test_it_is_one_round_trip_and_a_second_one_to_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    sent = recorded_requests(monkeypatch)
    model.train(optimizer, 0, lambda o, context_id: clip_grad_norm_(o, 0.1, context_id=context_id))
    assert names(sent) == [["norms_of"] * 2, ["scale"] * 2, ["step_of"] * 2]  # one message to each of the two owners
    factors = {args[1] for _, args, _ in sent[1].values()}
    assert len(factors) == 1
    assert factors.pop() < 1
    sent.clear()
    model.train(optimizer, 0, lambda o, context_id: clip_grad_norm_(o, 1e6, context_id=context_id))
    assert names(sent) == [["norms_of"] * 2, ["step_of"] * 2]  # nothing to scale


def names(sent: list[dict[int, Any]]) -> list[list[str]]:
    return [[function.__name__ for function, *_ in requests.values()] for requests in sent]


def give_grads(model: Spread, value: float = 1.0) -> None:
    for module in model.layers:
        rpc.rpc_sync(module.on, set_grads, (module.module_rref, value))


def norm_of_grads(model: Spread) -> float:
    grads = [
        grad
        for module in model.layers
        for grad in rpc.rpc_sync(module.on, grads_of, (module.module_rref,))
        if grad is not None
    ]
    return torch.stack([grad.norm() for grad in grads]).norm().item()


def test_gradients_are_clipped_at_once() -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    give_grads(model)
    clip_grad_norm_(optimizer, 1.0)
    assert norm_of_grads(model) == pytest.approx(1.0, rel=1e-5)
    give_grads(model)  # other gradients are not clipped, whatever reset the ones before
    before = model.values()
    optimizer.step()
    for old, new in zip(before[::2], model.values()[::2], strict=True):
        torch.testing.assert_close(new, old - 0.1)


def test_clipped_gradients_are_accumulated() -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [model.loss(torch.full((3, 4), 100.0))])
        assert clip_grad_norm_(optimizer, 1e-3, context_id=context_id) > 1e-3
        optimizer.accumulate(context_id)
    assert norm_of_grads(model) == pytest.approx(1e-3, rel=1e-3)


def test_a_step_repeated_after_a_failure_is_clipped() -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    give_grads(model)
    clip_grad_norm_(optimizer, 1.0)
    optimizer.param_groups[0]["lr"] = "bad"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    before = model.values()
    optimizer.step()
    moved = torch.stack([(new - old).norm() for old, new in zip(before, model.values(), strict=True)]).norm().item()
    assert moved == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_clipping_before_a_skipped_step_leaves_nothing(bad: float) -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(1))
    before = model.values()
    for value in (bad, 1.0):
        give_grads(model, value)
        scaler.unscale_(optimizer)
        clip_grad_norm_(optimizer, 1e6)
        scaler.step(optimizer)
        scaler.update()
    inverse = 2.0  # of the scale after the skipped step
    for old, new in zip(before[::2], model.values()[::2], strict=True):
        torch.testing.assert_close(new, old - 0.1 * inverse)


def test_parameters_that_share_a_gradient_are_clipped_once() -> None:
    pair = rpc.remote("w1", Pair)
    optimizer = DistributedOptimizer(optim.SGD, rpc.rpc_sync("w1", both_of, (pair,)), lr=1.0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [pair.rpc_sync().forward()])
        clip_grad_norm_(optimizer, 0.5, context_id=context_id)
        assert clip_grad_norm_(optimizer, 0.5, context_id=context_id).item() == pytest.approx(0.5, rel=1e-5)


def test_clipping_twice() -> None:
    model, local = Spread(), Local()
    ours = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    theirs = optim.SGD(local.parameters(), lr=0.1)
    for limit in (0.5, 0.25):
        norms: list[Tensor] = []

        def twice(o: Any, context_id: int | None, limit: float = limit, norms: list[Tensor] = norms) -> None:
            for maximum in (limit, limit / 2):
                norms.append(
                    clip_grad_norm_(o, maximum, context_id=context_id)
                    if o is ours
                    else clip_locally(local.parameters(), maximum)
                )

        model.train(ours, 0, twice)
        local.train(theirs, 0, twice)
        torch.testing.assert_close(norms[:2], norms[2:])
    for value, expected in zip(model.values(), local.values(), strict=True):
        torch.testing.assert_close(value, expected)


def test_references_are_clipped_at_once() -> None:
    model, local = Spread(PLACES), Local(3)
    for module, mine in zip(model.layers, local.layers, strict=True):
        rpc.rpc_sync(module.on, set_grads, (module.module_rref, 1.0))
        for place, parameter in enumerate(mine.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + place)
    norm = clip_grad_norm_(model.parameters(), 1.0)
    assert torch.equal(norm, clip_locally(local.parameters(), 1.0))
    for module, mine in zip(model.layers, local.layers, strict=True):
        grads = rpc.rpc_sync(module.on, grads_of, (module.module_rref,))
        for grad, parameter in zip(grads, mine.parameters(), strict=True):
            assert torch.equal(grad, parameter.grad)
    assert clip_grad_norm_(model.parameters()[0], 1e6) < norm
    with pytest.raises(TypeError, match="clip_grad_norm_ takes a DistributedOptimizer or RRefs to parameters"):
        clip_grad_norm_([torch.ones(1)], 1.0)  # type: ignore[list-item]


def test_without_gradients_and_with_sparse_ones() -> None:
    table = rpc.remote("w1", Table, (5, 2), {"sparse": True})
    weight = rpc.rpc_sync("w1", weight_of, (table,))
    optimizer = DistributedOptimizer(optim.SGD, [weight], lr=1.0)
    assert clip_grad_norm_(optimizer, 1.0) == 0
    before = weight.to_here().clone()
    with autograd.context() as context_id:
        autograd.backward(context_id, [table.rpc_sync().forward(torch.tensor([1, 1])).sum()])
        norm = clip_grad_norm_(optimizer, 0.5, context_id=context_id)
        assert norm == torch.full((2,), 2.0).norm()
        optimizer.step(context_id)
    assert (before - weight.to_here()).norm().item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_norms_that_are_not_finite(bad: float) -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    rpc.rpc_sync("w2", set_grads, (model.layers[1].module_rref, bad))
    with pytest.raises(
        RuntimeError, match=r"The total norm of order 2\.0 for gradients from `parameters` is non-finite"
    ):
        clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert not clip_grad_norm_(optimizer, 1.0).isfinite()
    optimizer.step()
    assert any(value.isnan().any() for value in model.values())


# ---- scaled losses


class Overflow(nn.Module):
    """Identity whose gradient is infinite in its second backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = x * 1
        if self.count == 2:
            y.register_hook(lambda grad: grad * float("inf"))
        return y


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_scaled_loss(unscale_first: bool) -> None:
    model, local = Spread(PLACES), Local(3)
    ours = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    theirs = optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    scalers = (
        GradScaler("cpu", init_scale=8.0, growth_interval=2),
        torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
    )
    scales: list[list[float]] = [[], []]
    overflow = Overflow(), Overflow()
    for number in range(5):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        with autograd.context() as context_id:
            loss = model.loss(x)
            autograd.backward(context_id, [scalers[0].scale(overflow[0](loss))])
            if unscale_first:
                scalers[0].unscale_(ours, context_id)
                clip_grad_norm_(ours, 0.5, context_id=context_id)
            scalers[0].step(ours, context_id)
        theirs.zero_grad()
        scalers[1].scale(overflow[1](local.loss(x))).backward()  # type: ignore[no-untyped-call]
        if unscale_first:
            scalers[1].unscale_(theirs)
            clip_locally(local.parameters(), 0.5)
        scalers[1].step(theirs)
        for scaler, seen in zip(scalers, scales, strict=True):
            scaler.update()
            seen.append(scaler.get_scale())
        assert_equal(model, local)
    assert scales[0] == scales[1]
    assert scales[0][1] < scales[0][0]  # the second step was skipped


def test_an_overflow_on_one_owner_skips_the_step_on_all() -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    before = model.values()
    for module, value in zip(model.layers, (1.0, float("inf")), strict=True):
        rpc.rpc_sync(module.on, set_grads, (module.module_rref, value))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(a, b) for a, b in zip(model.values(), before, strict=True))
    rpc.rpc_sync("w2", set_grads, (model.layers[1].module_rref, 2.0))
    rpc.rpc_sync("w1", set_grads, (model.layers[0].module_rref, 2.0))
    scaler.step(optimizer)
    assert torch.equal(model.values()[0], before[0] - 0.1 * (2.0 / 2.0))
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
        scaler.step(optimizer)


def test_gradients_are_unscaled_once_if_an_owner_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    fails: list[bool] = []
    exclusive = LocalOptimizer.exclusive

    def fails_on_w2(self: LocalOptimizer, *args: Any, **kwargs: Any) -> Any:
        if self._worker.info.name == "w2" and fails:
            fails.pop()
            raise OSError("the lock is held")
        return exclusive(self, *args, **kwargs)

    monkeypatch.setattr(LocalOptimizer, "exclusive", fails_on_w2)
    for _ in range(2):
        before = model.values()
        give_grads(model, 4.0)
        fails.append(True)
        with pytest.raises(OSError, match="the lock is held"):
            scaler.step(optimizer)
        assert not fails
        scaler.step(optimizer)
        scaler.update()
        assert_moved(model, before)
        optimizer.zero_grad()


def test_gradients_of_a_context_are_unscaled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, local = Spread(), Local()
    ours = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    theirs = optim.SGD(local.parameters(), lr=0.1)
    scaler, x = GradScaler("cpu", init_scale=4.0), torch.ones(2, 4)
    with autograd.context() as context_id:
        autograd.backward(context_id, [scaler.scale(model.loss(x))])
        monkeypatch.setattr("telegrad.optim.gradients.unscale", unscale_but_on_w2)
        with pytest.raises(OSError, match="w2"):
            scaler.step(ours, context_id)
        monkeypatch.undo()
        scaler.step(ours, context_id)
    local.loss(x).backward()  # type: ignore[no-untyped-call]
    theirs.step()
    assert_equal(model, local)


@pytest.mark.parametrize("by_optimizer", [True, False])
def test_new_gradients_are_unscaled_after_a_failure(monkeypatch: pytest.MonkeyPatch, by_optimizer: bool) -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    before = model.values()
    give_grads(model, 4.0)
    monkeypatch.setattr("telegrad.optim.gradients.unscale", unscale_but_on_w2)
    with pytest.raises(OSError, match="w2"):
        scaler.step(optimizer)
    monkeypatch.undo()
    if by_optimizer:
        optimizer.zero_grad()
    give_grads(model, 4.0)  # in new tensors
    scaler.step(optimizer)
    assert_moved(model, before)


def assert_moved(model: Spread, before: list[Tensor]) -> None:
    """Check that gradients of 4 (weights) and 5 (biases) were divided by 4 once."""
    for number, (value, old) in enumerate(zip(model.values(), before, strict=True)):
        torch.testing.assert_close(value, old - 0.1 * (4 + number % 2) / 4)


def unscale_but_on_w2(found: Iterable[Tensor], inverse: float) -> bool:
    if rpc.get_worker_info().name == "w2":
        raise OSError("w2")
    return unscale(found, inverse)


def test_a_scaler_that_is_off_and_a_local_optimizer() -> None:
    model, local = Spread(), Local()
    ours = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    theirs = optim.SGD(local.parameters(), lr=0.1)
    off, on = GradScaler("cpu", enabled=False), GradScaler("cpu", init_scale=4.0)
    x = torch.ones(2, 4)
    with autograd.context() as context_id:
        autograd.backward(context_id, [off.scale(model.loss(x))])
        off.step(ours, context_id=context_id)
        off.update()
    on.scale(local.loss(x)).backward()  # type: ignore[no-untyped-call]
    on.step(theirs)
    on.update()
    assert_equal(model, local)


def scaled_steps(scaler: GradScaler, device: str, owners: tuple[str, ...] = ("w1/cpu", "w2/cpu")) -> list[Any]:
    """Make three steps; return scales and values.

    The second one has an infinite gradient.
    """
    model = Spread(owners)
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    seen: list[Any] = []
    for number in range(3):
        with autograd.context() as context_id:
            loss = model.loss(torch.ones(2, 4)).to(device) * (float("inf") if number == 1 else 1.0)
            autograd.backward(context_id, [scaler.scale(loss)])
            scaler.unscale_(optimizer, context_id)
            clip_grad_norm_(optimizer, 1.0, context_id=context_id)
            scaler.step(optimizer, context_id)
            scaler.update()
        seen += [scaler.get_scale(), [value.cpu() for value in model.values()]]
    return seen


def test_the_cuda_form_takes_the_same_steps_with_tensors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the device of the tensors differs on a machine with CUDA."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    scaler = GradScaler("cuda", init_scale=8.0)
    assert scaler.is_enabled()
    seen = scaled_steps(scaler, "cpu")
    expected = scaled_steps(GradScaler("cpu", init_scale=8.0), "cpu")
    assert seen[::2] == expected[::2] == [8.0, 4.0, 4.0]
    for mine, theirs in zip(seen[1::2], expected[1::2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_the_cuda_form_is_off_without_cuda() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = GradScaler("cuda")
    seen = scaled_steps_without_overflow(scaler)
    assert not scaler.is_enabled()
    expected = scaled_steps_without_overflow(GradScaler("cpu", enabled=False))
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def scaled_steps_without_overflow(scaler: GradScaler) -> list[Tensor]:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [scaler.scale(model.loss(torch.ones(2, 4)))])
        scaler.unscale_(optimizer, context_id)
        scaler.step(optimizer, context_id)
        scaler.update()
    return model.values()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_losses_and_owners_on_cuda() -> None:
    seen = scaled_steps(GradScaler("cuda", init_scale=8.0), "cuda", ("w1/cuda:0", "w2/cuda:0"))
    expected = scaled_steps(GradScaler("cpu", init_scale=8.0), "cpu")
    assert seen[::2] == expected[::2]
    for mine, theirs in zip(seen[1::2], expected[1::2], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("method", ["step", "unscale_"])
def test_torchs_scaler_and_clipping_name_those_for_remote_parameters(method: str) -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(1))
    with pytest.raises(TypeError, match=r"Use telegrad\.optim\.GradScaler instead"):
        getattr(theirs, method)(optimizer)
    with pytest.raises(AttributeError, match=r"no attribute 'grad': .* telegrad\.optim\.clip_grad_norm_"):
        clip_locally(model.parameters(), 1.0)  # type: ignore[arg-type]


def test_a_reference_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match=r"^'RRef' object has no attribute 'nothing'$"):
        _ = Spread().parameters()[0].nothing  # type: ignore[attr-defined]


class Pair(nn.Module):
    """Two parameters whose gradients are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(2))

    def forward(self) -> Tensor:
        return (3 * (self.a + self.b)).sum()


def both_of(pair: rpc.RRef[Pair]) -> list[rpc.RRef[nn.Parameter]]:
    return [rpc.RRef(pair.local_value().a), rpc.RRef(pair.local_value().b)]


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float16))


def test_half_precision_gradients_are_refused() -> None:
    half = rpc.remote("w1", Half)
    optimizer = DistributedOptimizer(optim.SGD, [rpc.rpc_sync("w1", weight_of, (half,))], lr=0.1)
    rpc.rpc_sync("w1", set_grads, (half, 1.0))
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
