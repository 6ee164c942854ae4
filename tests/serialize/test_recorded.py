"""Recorded tensors: listed by the sender, replaced in order by the receiver."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from serialize_helpers import carry_segments
from torch import Tensor, nn

from telegrad.errors import SerializationError
from telegrad.serialize.pickling import Serializer


class Thing:
    def __init__(self, *values: Any) -> None:
        self.values = values


def leaf(*shape: int) -> Tensor:
    return torch.rand(shape, requires_grad=True)


def send(value: Any, how: str, wrap: Any = None) -> tuple[list[Any], Any]:
    """Return the tensors that the sender lists for a value, and the received value."""
    serializer = Serializer()
    if how == "codec":
        coded = serializer.codec.encode_recorded(value)
        assert coded is not None
        body, segments, recorded = coded
        return recorded, serializer.codec.decode(body, carry_segments(segments), wrap)
    recorded: list[Tensor] = []
    body, found = serializer.dumps(value, "value", recorded)
    return list(recorded), serializer.loads(body, carry_segments(found), wrap)


class Wrap:
    """Wrapper that stores its arguments and returns copies."""

    def __init__(self) -> None:
        self.given: list[list[Tensor]] = []

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        assert not any(t.requires_grad for t in tensors)
        self.given.append(tensors)
        return tuple(t.detach().clone().requires_grad_() for t in tensors)


@pytest.mark.parametrize("how", ["codec", "pickle"])
def test_listed_and_wrapped_in_one_order(how: str) -> None:
    a, b, c, p = leaf(2), leaf(0, 3), leaf(4, 4)[:, 1], nn.Parameter(torch.ones(3))
    wrap = Wrap()
    recorded, arrived = send((a, torch.ones(2), {"b": [b, a]}, c, p), how, wrap)
    expected = (a, b, c, p)
    assert len(recorded) == 4
    assert all(any(t is e for e in expected) for t in recorded)
    (given,) = wrap.given
    assert all(torch.equal(t, g) for t, g in zip(recorded, given, strict=True))
    first, plain, more, third, fourth = arrived
    assert more["b"][1] is first
    assert not plain.requires_grad
    for tensor, origin in zip((first, more["b"][0], third, fourth), expected, strict=True):
        assert torch.equal(tensor, origin)
        assert type(tensor) is Tensor
        assert not any(tensor is g for g in given)


@pytest.mark.parametrize("how", ["codec", "pickle"])
def test_wrapper_is_not_called_without_tensors_that_require_grad(how: str) -> None:
    wrap = Wrap()
    recorded, arrived = send((torch.ones(2), 1), how, wrap)
    assert recorded == wrap.given == []
    assert torch.equal(arrived[0], torch.ones(2))


@pytest.mark.parametrize("how", ["codec", "pickle"])
def test_listed_tensors_arrive_as_leaves_without_a_wrapper(how: str) -> None:
    for value in (leaf(2), nn.Parameter(torch.ones(2)), leaf(2) * 2):
        _, arrived = send([value], how)
        assert arrived[0].is_leaf
        assert arrived[0].requires_grad


def test_special_tensors_are_pickled_separately() -> None:
    sparse = torch.eye(2).to_sparse().requires_grad_()
    conjugate = torch.randn(2, dtype=torch.complex64, requires_grad=True).conj()
    dense = leaf(2)
    wrap = Wrap()
    recorded, arrived = send(Thing(sparse, dense, conjugate, sparse), "pickle", wrap)
    assert [any(t is e for e in (dense, sparse, conjugate)) for t in recorded] == [True] * 3
    (given,) = wrap.given
    assert sorted(str(t.layout) for t in given) == ["torch.sparse_coo", "torch.strided", "torch.strided"]
    one, two, three, four = arrived.values
    assert one is four
    assert torch.equal(one.to_dense(), torch.eye(2))
    assert torch.equal(two, dense)
    assert torch.equal(three, conjugate)
    _, arrived = send(Thing(sparse), "pickle")
    assert arrived.values[0].requires_grad, "a leaf, without a wrapper"


def test_parameters_of_an_object_stay_parameters() -> None:
    layer, frozen = nn.Linear(2, 2), nn.Parameter(torch.ones(1), requires_grad=False)
    recorded, arrived = send((layer, layer.weight, frozen), "pickle", Wrap())
    assert len(recorded) <= 1
    assert isinstance(arrived[0].bias, nn.Parameter)
    assert isinstance(arrived[2], nn.Parameter)
    assert Serializer().codec.encode_recorded(frozen) is None
    assert Serializer().codec.encode(nn.Parameter(torch.ones(1))) is None


def test_recorded_ones_share_no_memory() -> None:
    base, plain = leaf(4), torch.arange(4.0)
    _, (one, two, three, four) = send((base, base[:2], plain, plain[1:]), "pickle", lambda tensors: tensors)
    one.zero_()
    three.zero_()
    assert torch.equal(two, base[:2])
    assert torch.equal(four, torch.zeros(3))


@pytest.mark.parametrize("how", ["codec", "pickle"])
def test_wrapper_must_return_as_many_tensors(how: str) -> None:
    with pytest.raises(ValueError, match=r"different number|zip\(\)|shorter"):
        send((leaf(1), leaf(1)), how, lambda tensors: tensors[:1])
    with pytest.raises(KeyError, match="own"):
        send((leaf(1),), how, lambda _: {}["own"])


class Wrapper(Tensor):
    """Subclass with its own dispatch, as of torchao or DTensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*(each.inner if isinstance(each, Wrapper) else each for each in args), **(kwargs or {}))
        return Wrapper(found)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return Wrapper, (self.inner,)


class Reduced(Tensor):
    def __reduce_ex__(self, _protocol: Any) -> Any:
        return reduced, (self.detach().as_subclass(Tensor),)


def reduced(plain: Tensor) -> Tensor:
    return plain.as_subclass(Reduced)


OWN = {"dispatch": lambda: Wrapper(torch.ones(2)), "reduction": lambda: torch.ones(2).as_subclass(Reduced)}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_a_subclass_whose_gradient_would_be_lost_is_refused(make: Any) -> None:
    tensor = make().requires_grad_()
    kind = type(tensor).__name__
    text = rf"a {kind} that requires grad .* Send its parts.* \(at value\['a'\]\[1\], of type \S+\.{kind}\)"
    with pytest.raises(SerializationError, match=text):
        send({"a": [leaf(2), tensor]}, "pickle")
    Serializer().dumps(tensor)  # not recorded
    recorded, _ = send((make(), leaf(2)), "pickle")
    assert len(recorded) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_nested_tensor_that_requires_grad_is_refused() -> None:
    tensor = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    send([tensor, {0}], "pickle")
    with pytest.raises(SerializationError, match=r"a nested tensor that requires grad .* `unbind\(\)`.*at value\[0\]"):
        send([tensor.requires_grad_(), {0}], "pickle")


class Pair(NamedTuple):
    left: Any
    right: Any


class Row(list[Any]): ...


@pytest.mark.parametrize("make", [Pair, lambda *each: OrderedDict(enumerate(each)), lambda *each: Row(each)])
def test_parameters_in_subclasses_of_containers_get_gradients(make: Any) -> None:
    p, x = nn.Parameter(torch.ones(2)), leaf(2)
    wrap = Wrap()
    recorded, arrived = send(make(p, x), "pickle", wrap)
    assert sorted(map(id, recorded)) == sorted(map(id, (p, x)))
    assert type(arrived) is type(make(p, x))
    assert len(wrap.given[0]) == 2
    first = arrived.left if isinstance(arrived, Pair) else arrived[0]
    assert type(first) is Tensor
    assert torch.equal(first, p)
