"""Pending work completes its future once, like the future that it follows."""

from typing import Any

import pytest

from telegrad.errors import Cancelled
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.pending_work import PendingWork


@pytest.fixture
def future() -> CallFuture[Any]:
    return CallFuture._of(is_read=True)


@pytest.fixture
def source() -> CallFuture[Any]:
    return CallFuture._of(is_read=True)


def test_values_of_the_source_are_passed_on(future: CallFuture[Any], source: CallFuture[Any]) -> None:
    unused: list[str] = []
    PendingWork(future, "f on w1").follow(source, on_unused=lambda: unused.append("value"))
    source.set_result(1)
    assert future.wait() == 1
    assert unused == []


def test_errors_of_the_source_are_passed_on(future: CallFuture[Any], source: CallFuture[Any]) -> None:
    PendingWork(future, "f on w1").follow(source)
    source.set_exception(SystemExit(3))
    with pytest.raises(SystemExit):
        future.wait()


def test_values_that_a_check_refuses_fail(future: CallFuture[Any], source: CallFuture[Any]) -> None:
    def refuse(value: object) -> None:
        raise ValueError(value)

    PendingWork(future, "f on w1").follow(source, refuse)
    source.set_result(1)
    with pytest.raises(ValueError, match="1"):
        future.wait()


@pytest.mark.parametrize("is_value", [True, False])
def test_late_values_are_reported_once(is_value: bool, future: CallFuture[Any], source: CallFuture[Any]) -> None:
    unused: list[str] = []
    work = PendingWork(future, "f on w1")
    work.follow(source, on_unused=lambda: unused.append("value"))
    assert work.cancel()
    if is_value:
        source.set_result(1)
    else:
        source.set_exception(ValueError())
    assert unused == ["value"] * is_value
    with pytest.raises(Cancelled):
        future.wait()
