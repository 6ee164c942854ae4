"""Errors, losses and timeouts of a backward pass over simulated workers."""

from typing import Any

import pytest
import torch
from simulated_group import Group, Hang
from test_backward_pass import called, leaf
from torch import Tensor

from telegrad.errors import RemoteError, RpcTimeout, WorkerLost


class Oops(Exception):
    pass


def test_a_remote_error_is_raised_with_its_origin() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()

    def fail(grad: Tensor) -> None:
        raise KeyError("no such thing")

    w.register_hook(fail)
    with pytest.raises(KeyError, match=r"^'no such thing'$") as caught:
        group.backward(0, [called(group, x, w).sum()])
    assert isinstance(caught.value, RemoteError)
    assert caught.value.worker == "w1"
    assert "in fail" in caught.value.remote_traceback
    assert all(part.is_over and not part.holds_graph for part in group.passes.values())


def test_a_local_error_is_raised_unchanged() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    error = Oops("here")

    def fail(grad: Tensor) -> None:
        raise error

    x.register_hook(fail)
    with pytest.raises(Oops) as caught:
        group.backward(0, [(x * 2).sum()])
    assert caught.value is error
    with pytest.raises(Oops, match=r"^here$") as caught:  # after messages
        group.backward(0, [called(group, x, w).sum()])
    assert caught.value.__cause__ is error


def test_a_context_can_be_used_after_an_error() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    failing = True

    def fail(grad: Tensor) -> None:
        if failing:
            raise Oops

    w.register_hook(fail)
    loss = called(group, x, w).sum()
    with pytest.raises(Oops):
        group.backward(0, [loss], retain_graph=True)
    failing = False
    group.backward(0, [called(group, x, w).sum()])
    assert torch.equal(group.contexts[1].gradients[w], x)


def test_loss_of_an_indirectly_connected_worker_is_noticed() -> None:
    """The root has no connection to worker 2."""
    group, x, w = Group(3, 0), leaf(), leaf()
    (one,) = group.transfer(0, 1, [x])
    (two,) = group.transfer(1, 2, [one])
    (three,) = group.transfer(2, 1, [two * w])
    (back,) = group.transfer(1, 0, [three])
    number = group.begin(0, [back.sum()])
    group.deliver()
    group.kill(2)
    group.settle()
    with pytest.raises(Hang, match="worker w2: 1 x gradients"):
        group.result(number)
    group.report_loss(1, 2)
    group.settle()
    with pytest.raises(WorkerLost, match="worker w2 is lost: its process died"):
        group.result(number)


def test_timeout() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    number = group.begin(0, [called(group, x, w).sum()])
    root = group.passes[0, number]
    assert root.describe_pending() == "worker w1: 1 x gradients"
    root.abort(RpcTimeout(1, "a backward pass", root.describe_pending()))
    assert root.is_over
    group.settle()
    with pytest.raises(RpcTimeout, match="worker w1"):
        group.result(number)
    assert not group.contexts[1].gradients or not group.passes[1, number].holds_graph


def test_a_gradient_for_an_unknown_message_is_an_error() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()
    loss = called(group, x, w).sum()
    group.contexts[1].sends.clear()
    with pytest.raises(LookupError, match="no record at this worker"):
        group.backward(0, [loss])


def test_a_message_that_cannot_be_sent_fails_the_pass() -> None:
    group, x, w = Group(2, 0), leaf(), leaf()

    def refuse(src: int, dst: int, message: Any) -> None:
        if src == 1 and message[0] == 0:
            raise Oops("too large")

    group.on_send = refuse
    with pytest.raises(Oops, match="too large"):
        group.backward(0, [called(group, x, w).sum()])
