"""Batches of streams: which items are copied into one."""

from typing import Any

import pytest
import torch

from telegrad.streams.batches import SOLITARY, copy_item

KIB = 1 << 10
SMALL = 64 * KIB  # bytes: the most that one item in a batch may have


def tensors(number: int, size: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(size, dtype=torch.uint8) for _ in range(number))


def nested(depth: int, width: int) -> Any:
    return 0 if depth == 0 else [nested(depth - 1, width) for _ in range(width)]


@pytest.mark.parametrize(
    "item",
    [5, "text", b"bytes", None, (1, [2.0, {"a": (3,)}]), *tensors(1, SMALL), tensors(8, 8 * KIB), nested(2, 64)],
    ids=lambda item: type(item).__name__,
)
def test_small_items_are_copied(item: Any) -> None:
    copy = copy_item(item)
    assert copy is not SOLITARY
    assert type(copy) is type(item)
    assert str(copy) == str(item)


@pytest.mark.parametrize(
    "item",
    [
        *tensors(1, SMALL + 1),
        tensors(9, 8 * KIB),
        [list(tensors(2, 20 * KIB)), {"a": tensors(2, 20 * KIB)}],
        ["a" * (40 * KIB), b"b" * (40 * KIB)],
        nested(4, 16),
        torch.ones(2, requires_grad=True),
    ],
    ids=["tensor", "tensors", "nested tensors", "texts", "numbers", "graph"],
)
def test_an_item_that_is_large_as_a_whole_has_its_own_batch(item: Any) -> None:
    assert copy_item(item) is SOLITARY


@pytest.mark.parametrize("part", [[1], {"a": 1}, (1, 2), torch.ones(3)], ids=lambda part: type(part).__name__)
def test_an_item_with_a_part_twice_has_its_own_batch(part: Any) -> None:
    """A call keeps the identity of the parts."""
    assert copy_item([part, [part]]) is SOLITARY


def test_views_of_one_memory_have_their_own_batch() -> None:
    tensor = torch.ones(3)
    assert copy_item((tensor, tensor[1:])) is SOLITARY
