"""wait_all and collect_all end at the first error of any future."""

import logging
import threading
from typing import Any

import pytest
import torch
from torch.futures import Future

from telegrad.compat.futures import collect_all, wait_all
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.unread_failures import log_unread


def done(value: Any) -> CallFuture:
    future = CallFuture._of()
    future.set_result(value)
    return future


def test_all_values_in_order() -> None:
    plain: Future[int] = Future()
    plain.set_result(2)
    assert wait_all([done(1), plain, done(3)]) == [1, 2, 3]
    assert wait_all([]) == []


def test_iterators_are_read_once() -> None:
    assert wait_all(done(i) for i in range(3)) == [0, 1, 2]
    assert wait_all(map(done, range(3))) == [0, 1, 2]


def test_first_error_ends_the_wait_and_keeps_its_type() -> None:
    never, failing = CallFuture._of(), CallFuture._of()
    threading.Timer(0.01, failing.set_exception, [KeyError("k")]).start()
    with pytest.raises(KeyError, match="k"):
        wait_all([done(1), never, failing])


def test_error_that_torch_has_set_ends_it_too() -> None:
    parent: Future[int] = Future()
    failing = parent.then(lambda _: 1 / 0)
    parent.set_result(1)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        wait_all([CallFuture._of(), failing])


def test_several_errors_are_decided_once() -> None:
    futures = [CallFuture._of() for _ in range(3)]
    for i, future in enumerate(futures):
        future.set_exception(ValueError(str(i)))
    with pytest.raises(ValueError, match="0"):
        wait_all(futures)


def test_torchs_futures_alone_use_torchs_wait_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.compat.futures._torch_wait_all", lambda futures: "torch's")
    assert wait_all([Future()]) == "torch's"  # type: ignore[comparison-overlap]


def test_all_futures_are_collected_in_order() -> None:
    plain: Future[int] = Future()
    late = CallFuture._of()
    given = [done(1), plain, late]
    collected = collect_all(iter(given))
    values = collected.then(lambda future: [each.wait() for each in future.value()])
    plain.set_result(2)
    assert not collected.done()
    late.set_result(3)
    assert values.wait() == [1, 2, 3]
    assert all(mine is theirs for mine, theirs in zip(collected.wait(), given, strict=True))


def test_collected_futures_fail_with_the_first_error() -> None:
    never, failing = CallFuture._of(), CallFuture._of()
    collected = collect_all([done(1), never, failing])
    seen = collected.then(lambda future: future.done())
    failing.set_exception(KeyError("k"))
    assert collected.done()
    assert seen.wait()
    with pytest.raises(KeyError, match="k"):
        collected.wait()
    never.set_exception(ValueError("later"))
    with pytest.raises(ValueError, match="later"):
        wait_all([CallFuture._of(), collect_all([CallFuture._of(), never, collected])])


def test_collected_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    futures = [CallFuture._of() for _ in range(3)]
    collected = collect_all(futures)
    for future in futures:
        future.set_exception(KeyError("k"))
    del future, futures, collected
    with caplog.at_level(logging.WARNING, "telegrad"):
        log_unread()
    assert [record.getMessage() for record in caplog.records] == [
        "a call failed, and the program did not read its future: KeyError: 'k'"
    ]


def test_torchs_futures_alone_use_torchs_collect_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.compat.futures._torch_collect_all", lambda futures: "torch's")
    assert collect_all([Future()]) == "torch's"  # type: ignore[comparison-overlap]


def test_torch_still_lacks_this() -> None:
    """The day that this fails, the module can go."""
    never: Future[int] = Future()
    failed: Future[int] = Future()
    failed.set_exception(KeyError("k"))  # type: ignore[arg-type]
    assert not torch.futures.collect_all([never, failed]).done()
