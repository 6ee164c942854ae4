"""Gradients of one context and steps of another, with a scaler or clipping."""

from collections.abc import Iterator

import pytest
import torch
from model_helpers import Spread, batch
from torch import optim

from telegrad import autograd
from telegrad.optim import DistributedOptimizer, GradScaler, clip_grad_norm_
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


@pytest.mark.parametrize("unscaled_in_context", [True, False])
def test_a_step_for_other_gradients_than_were_unscaled_is_refused(unscaled_in_context: bool) -> None:
    model, scaler = Spread(), GradScaler("cpu")
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [scaler.scale(model.loss(batch(0)))])
        unscaled, stepped = (context_id, None) if unscaled_in_context else (None, context_id)
        scaler.unscale_(optimizer, unscaled)
        with pytest.raises(RuntimeError, match=r"step\(\) is for .*, but unscale_\(\) has unscaled .* same context_id"):
            scaler.step(optimizer, stepped)
        scaler.update()
        scaler.unscale_(optimizer, context_id)
        scaler.step(optimizer, context_id)  # after the update, the next round is free to choose
        scaler.update()


def test_a_step_that_has_failed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, scaler = Spread(), GradScaler("cpu")
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)

    def fail(*_: object) -> None:
        raise ConnectionError("lost")

    with autograd.context() as context_id:
        autograd.backward(context_id, [scaler.scale(model.loss(batch(0)))])
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "step", fail)
            with pytest.raises(ConnectionError):
                scaler.step(optimizer, context_id)
        before = model.values()
        scaler.step(optimizer, context_id)
        assert not all(torch.equal(a, b) for a, b in zip(model.values(), before, strict=True))
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
            scaler.step(optimizer, context_id)
        scaler.update()


@pytest.mark.parametrize("by_optimizer", [True, False])
def test_clipping_in_an_ended_context_is_refused(by_optimizer: bool) -> None:
    model = Spread()
    optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [model.loss(batch(0))])
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        clip_grad_norm_(optimizer if by_optimizer else model.parameters(), 1.0, context_id=context_id)
