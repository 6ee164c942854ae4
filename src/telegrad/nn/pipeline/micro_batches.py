"""Division of a batch into micro-batches, and joining of their results."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Values",
    "as_values",
    "batch_size",
    "divide",
    "join",
    "join_gradients",
    "split",
    "split_target",
    "target_values",
]

Values: TypeAlias = tuple[object, ...]
"""Arguments or results of a module: tensors and other values."""


def batch_size(values: Iterable[object]) -> int:
    """Return the common size of the tensors' first dimension.

    Raises:
        ValueError: the sizes differ, or no tensor has a dimension.
    """
    sizes = [value.shape[0] for value in values if isinstance(value, Tensor) and value.dim()]
    if not sizes:
        raise ValueError("a pipeline divides tensors along their first dimension: pass at least one with a dimension")
    if len(set(sizes)) > 1:
        raise ValueError(f"the tensors of a batch differ in their first dimension: {', '.join(map(str, sizes))}")
    return sizes[0]


def divide(batch: int, micro_batches: int) -> tuple[int, ...]:
    """Return the sizes of the micro-batches, which differ by one at most."""
    size, larger = divmod(batch, micro_batches)
    return (size + 1,) * larger + (size,) * (micro_batches - larger)


def split(values: Values, sizes: Sequence[int]) -> list[Values]:
    """Split each tensor along its first dimension.

    Every micro-batch gets all other values, and tensors without a dimension, as they are.
    """
    columns = [
        torch.split(value, list(sizes)) if isinstance(value, Tensor) and value.dim() else (value,) * len(sizes)
        for value in values
    ]
    return list(zip(*columns, strict=True)) if columns else [() for _ in sizes]


def as_values(result: object) -> Values:
    """Return what a module has returned as the arguments of the next one.

    Raises:
        TypeError: a tensor is in a container within the result, where gradients would not reach it.
    """
    items = _items(result)
    container = _container_in(items)
    if container is not None:
        raise TypeError(
            "a stage of a pipeline returns a tensor, or a tuple or list of tensors and other values; its result has a"
            f" {type(container).__name__} inside"
        )
    return items


def target_values(target: object) -> Values:
    """Return the items of a target.

    Raises:
        TypeError: a tensor may be in a container within the target, which would not be divided.
    """
    items = _items(target)
    container = _container_in(items)
    if container is not None:
        found = f"is a {type(target).__name__}" if container is target else f"has a {type(container).__name__} inside"
        raise TypeError(
            "the target of a pipeline's step is a tensor, or a tuple or list of tensors and other values; the given one"
            f" {found}, whose tensors would not be divided into micro-batches"
        )
    return items


def split_target(target: object, sizes: Sequence[int]) -> list[object]:
    """Return the target of each micro-batch.

    It is a tuple, a list or a single value, like the given target.
    """
    parts = split(_items(target), sizes)
    if isinstance(target, list):
        return [list(part) for part in parts]
    return list(parts) if isinstance(target, tuple) else [value for (value,) in parts]


def _items(value: object) -> Values:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _container_in(items: Values) -> object:
    return next((item for item in items if isinstance(item, (tuple, list, dict, set))), None)


def join(results: Sequence[object]) -> object:
    """Return the results of the micro-batches as one result of the batch.

    Tensors are concatenated along their first dimension, or stacked if they have none. Of other values it is the list.
    Tuples and lists are joined item by item.
    """
    first = results[0]
    if isinstance(first, (tuple, list)):
        return tuple(join(column) for column in zip(*map(as_values, results), strict=True))
    tensors = [result for result in results if isinstance(result, Tensor)]
    if len(tensors) < len(results):
        return list(results)
    return torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors)


def join_gradients(gradients: Sequence[Values], sizes: Sequence[int]) -> list[Tensor | None]:
    """Return the gradients of the batch's tensors; None for those without a gradient.

    Args:
        gradients: of each micro-batch.
        sizes: of the micro-batches; one without a gradient counts as zeros.
    """
    return [_join_gradients(column, sizes) for column in zip(*gradients, strict=True)]


def _join_gradients(column: Sequence[object], sizes: Sequence[int]) -> Tensor | None:
    found = [gradient for gradient in column if isinstance(gradient, Tensor)]
    if not found:
        return None
    if not found[0].dim():  # of a tensor that every micro-batch got whole
        return torch.stack(found).sum(0)
    filled = [
        gradient if isinstance(gradient, Tensor) else found[0].new_zeros(size, *found[0].shape[1:])
        for gradient, size in zip(column, sizes, strict=True)
    ]
    return torch.cat(filled)
