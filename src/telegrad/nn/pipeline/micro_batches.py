"""Division of a batch into micro-batches, and joining of their results."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Values", "as_values", "batch_size", "divide", "join", "join_gradients", "split"]

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
    if not isinstance(result, (tuple, list)):
        _check_item(result)
        return (result,)
    for item in result:
        _check_item(item)
    return tuple(result)


def _check_item(item: object) -> None:
    if isinstance(item, (tuple, list, dict, set)):
        raise TypeError(
            "a stage of a pipeline returns a tensor, or a tuple or list of tensors and other values; its result has a"
            f" {type(item).__name__} inside"
        )


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
