"""Tensors that are more than elements in memory, with ``allow_pickle=False``."""

from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import PickleRefused, SerializationError
from telegrad.testing import Cluster


def echo(value: Any) -> Any:
    return value


def imaginary(x: torch.Tensor) -> torch.Tensor:
    return x.conj().imag


def test_lazily_conjugated_and_negated_tensors_are_sent(strict: Cluster) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    for sent, value in ((x.conj(), [1 - 2j, 3 + 4j]), (x.conj().imag, [-2.0, 4.0])):
        for arrived in (rpc.rpc_sync("w1", echo, (sent,)), rpc.rpc_sync("w1", echo, ([x, sent, sent],))[2]):
            assert arrived.tolist() == value
            assert not any((arrived.is_conj(), arrived.is_neg(), arrived.requires_grad))
    assert rpc.rpc_sync("w1", echo, (x.clone().requires_grad_().conj(),)).requires_grad
    small = torch.ones(3000, dtype=torch.complex64)
    small.untyped_storage().resize_(0)
    for each in (small.conj(), [small, small]):
        with pytest.raises(SerializationError, match="its storage has 0 of 24000 bytes"):
            rpc.rpc_sync("w1", echo, (each,))


def test_complex_gradients_travel(strict: Cluster) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j], requires_grad=True)
    imaginary(torch.view_as_complex(torch.view_as_real(x) * 2) * x).sum().backward()
    expected = x.grad
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", torch.mul, (x, 2))
        z = rpc.rpc_sync("w1", imaginary, ((y * x).conj().resolve_conj().conj(),))
        autograd.backward(context_id, [z.sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], expected)


def test_a_sparse_gradient_is_refused_with_a_remedy(strict: Cluster) -> None:
    weight = torch.ones(5, 2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", echo, (weight,))
        loss = torch.nn.functional.embedding(torch.tensor([1, 2]), y, sparse=True).sum()
        with pytest.raises(PickleRefused, match=r"sparse_coo.*its to_dense\(\).*gradient .* sparse=False"):
            autograd.backward(context_id, [loss])


def test_frozen_parameters_travel_in_autograd_contexts(strict: Cluster) -> None:
    frozen, trained = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.nn.Parameter(torch.ones(2))
    with autograd.context() as context_id:
        for value in (frozen, [frozen]):
            (arrived,) = rpc.rpc_sync("w1", echo, ([value],))
            arrived = arrived[0] if isinstance(arrived, list) else arrived
            assert type(arrived) is torch.nn.Parameter
            assert not arrived.requires_grad
        arrived, y = rpc.rpc_sync("w1", echo, ([frozen, trained],))
        autograd.backward(context_id, [(arrived * y).sum()])
        assert autograd.get_gradients(context_id)[trained].tolist() == [1, 1]
