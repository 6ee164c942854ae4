"""Results of handlers that are awaited, and those that are values."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.serving.deferred_results import deferred_result, has_deferred_results, mark_async


def plain() -> None: ...


@rpc.functions.async_execution
def marked() -> Any: ...


async def value() -> int:
    return 1


@pytest.fixture
def coroutine() -> Iterator[object]:
    made = value()
    yield made
    made.close()


def test_coroutines_are_deferred_with_and_without_the_mark(coroutine: object) -> None:
    assert deferred_result(plain, coroutine) is coroutine
    assert deferred_result(marked, coroutine) is coroutine


@pytest.mark.parametrize("future", [CallFuture([]), torch.futures.Future(), torch.futures.collect_all([])])
def test_futures_are_deferred_with_the_mark_only(future: object) -> None:
    assert deferred_result(marked, future) is future
    assert deferred_result(plain, future) is None


def test_other_results_are_values_without_the_mark() -> None:
    assert deferred_result(plain, 1) is None
    assert deferred_result(plain, None) is None
    assert deferred_result(len, value) is None  # the function, not its coroutine


def test_the_mark_requires_a_future() -> None:
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future object, but got builtins\.int from"):
        deferred_result(marked, 1)


def test_objects_can_be_marked() -> None:
    def function() -> None: ...

    future: CallFuture[None] = CallFuture([])
    assert deferred_result(function, future) is None
    mark_async(function)
    assert deferred_result(function, future) is future


def test_lists_of_results_are_deferred_by_the_mark_or_a_coroutine(coroutine: object) -> None:
    assert has_deferred_results(marked, [])
    assert has_deferred_results(plain, [1, coroutine])
    assert not has_deferred_results(plain, [1, CallFuture([])])
