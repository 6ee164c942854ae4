"""Results of `rpc.map` are those of single calls, whatever the chunks."""

import asyncio
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from map_helpers import identity

from telegrad import autograd, rpc
from telegrad.rpc.copies import Copier
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster

pytestmark = [pytest.mark.usefixtures("clean")]

total = torch.zeros(2)
history: list[int] = []


@dataclasses.dataclass
class Box:
    value: Any


box = Box(0)


def add_to_buffer(x: int) -> torch.Tensor:
    return total.add_(x)


def add_to_view(x: int) -> Any:
    return {"a": (total.add_(x)[:1],)}


def append(x: int) -> list[int]:
    history.append(x)
    return history


def count_in_object(x: int) -> Box:
    box.value += x
    return box


async def append_later(x: int) -> list[int]:
    history.append(x)
    await asyncio.sleep(0)
    return history


@async_execution
def append_by_future(x: int) -> Any:
    return rpc.rpc_async("w0", identity, (x,)).then(lambda done: append(done.value()))


def increment(x: Any) -> Any:
    return x.add_(1)


@pytest.fixture(autouse=True)
def empty() -> None:
    total.zero_()
    history.clear()
    box.value = 0


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_functions_that_reuse_a_result(chunk: int | None) -> None:
    count = list(range(1, 9))

    def run(function: Any) -> list[Any]:
        return list(rpc.map("w1", function, [1] * 8, chunk=chunk, in_flight=1))

    assert [int(tensor[0]) for tensor in run(add_to_buffer)] == count
    assert [int(each["a"][0]) for each in run(add_to_view)] == [8 + n for n in count]
    assert [len(each) for each in run(append)] == count
    assert [each.value for each in run(count_in_object)] == count


@pytest.mark.parametrize("function", [append_later, append_by_future])
def test_deferred_results_are_copied(function: Any) -> None:
    got = list(rpc.map("w1", function, [1] * 4, chunk=4))
    assert len({id(each) for each in got}) == 4


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_iterables_that_reuse_an_item(chunk: int | None) -> None:
    def tensors(n: int) -> Iterator[torch.Tensor]:
        buffer = torch.zeros(n)
        for number in range(8):
            yield buffer.fill_(number)

    def lists() -> Iterator[list[int]]:
        items: list[int] = []
        for number in range(8):
            items.append(number)
            yield items

    def objects() -> Iterator[Box]:
        for number in range(8):
            box.value = number
            yield box

    for n in (2, 1 << 16):
        assert [int(x[-1]) for x in rpc.map("w1", identity, tensors(n), chunk=chunk)] == list(range(8))
    assert [len(x) for x in rpc.map("w1", identity, lists(), chunk=chunk)] == list(range(1, 9))
    assert [x.value for x in rpc.map("w1", identity, objects(), chunk=chunk)] == list(range(8))


def test_an_item_that_is_given_several_times() -> None:
    x = torch.zeros(2)
    got = list(rpc.map("w1", increment, [x] * 8, chunk=4))
    assert [int(each[0]) for each in got] == [1] * 8
    got[0].fill_(7)
    assert [int(each[0]) for each in got[1:]] == [1] * 7


def test_immutable_values_are_not_copied(two: Cluster) -> None:
    copy = Copier(two[0]._worker).copy
    for value in (1000, "x" * 100_000, b"x" * 100_000, 1.5, None, (1000, "x", None)):
        assert copy(value) is value


def test_values_with_references_or_gradients_stay_as_they_are(two: Cluster) -> None:
    copy = Copier(two[0]._worker).copy
    for value in ([rpc.RRef(1)], torch.ones(2, requires_grad=True), Box(torch.ones(2, requires_grad=True) + 1), sys):
        assert copy(value) is value
    del value
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        results = list(rpc.map("w1", torch.neg, [x, x, x], chunk=3))
        autograd.backward(context_id, [sum(results).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), -3.0))


def test_copies_have_what_a_message_carries(two: Cluster) -> None:
    value = [torch.arange(1000)[::2], {"a": torch.ones(3, dtype=torch.complex64).conj()}, {1, 2}]
    copied = Copier(two[0]._worker).copy(value)
    assert torch.equal(copied[0], value[0])
    assert torch.equal(copied[1]["a"], value[1]["a"])
    assert copied[2] == {1, 2}
    assert copied[0].untyped_storage().data_ptr() != value[0].untyped_storage().data_ptr()
