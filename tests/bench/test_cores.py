"""Who measures waits until the cores are near, for a while. Where they are is made up."""

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest

pytest.importorskip("rich")

from bench import cores
from bench.cores import FAR, in_words, near

HERE, THERE = 120e-9, 500e-9


def seen(*places: float) -> Callable[[], float]:
    """The places one after the other, then the last of them for ever."""
    coming: Iterator[float] = chain(places, repeat(places[-1]))
    return lambda: next(coming)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Made-up time, which passes while somebody sleeps, and a second with each measurement."""
    time = [0.0]
    monkeypatch.setattr(cores.time, "monotonic", lambda: time[0])
    monkeypatch.setattr(cores.time, "sleep", lambda seconds: time.__setitem__(0, time[0] + seconds))
    return time


def measuring(clock: list[float]) -> Callable[[], int]:
    counter = iter(range(1, 100))

    def measure() -> int:
        clock[0] += 1.0
        return next(counter)

    return measure


def test_near_cores_are_not_waited_for(clock: list[float]) -> None:
    found = near(measuring(clock), 20.0, True, seen(HERE))
    assert (found.what, found.apart, found.waited) == (1, HERE, 0.0)


def test_measuring_begins_when_they_have_come_near(clock: list[float]) -> None:
    found = near(measuring(clock), 20.0, True, seen(THERE, THERE, THERE, HERE))
    assert (found.what, found.apart) == (1, HERE)
    assert found.waited == pytest.approx(3 * cores.PAUSE)


def test_patience_ends_and_it_is_said_where_they_were(clock: list[float]) -> None:
    found = near(measuring(clock), 2.0, True, seen(THERE))
    assert (found.what, found.apart) == (1, THERE)
    assert 2.0 - cores.PAUSE < found.waited < 2.0 + 2 * cores.PAUSE


def test_what_they_moved_away_from_is_measured_again(clock: list[float]) -> None:
    found = near(measuring(clock), 20.0, True, seen(HERE, THERE, THERE, HERE, HERE))
    assert (found.what, found.apart) == (2, HERE)
    assert found.waited == pytest.approx(1.0 + cores.PAUSE)


@pytest.mark.parametrize(("patience", "again"), [(20.0, False), (1.0, True), (0.0, True)])
def test_or_not_where_that_may_not_be_or_takes_too_long(clock: list[float], patience: float, again: bool) -> None:
    found = near(measuring(clock), patience, again, seen(HERE, THERE))
    assert (found.what, found.apart, found.waited) == (1, THERE, 0.0)


def test_a_look_takes_a_moment_and_is_a_time() -> None:
    assert 0.0 < cores.apart() < 1.0


def test_nobody_looks_without_a_compiler_or_with_one_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 3})
    assert cores.can_look()
    monkeypatch.setenv("CXX", str(tmp_path / "no compiler"))
    monkeypatch.setattr(cores.limit, "ROOT", tmp_path)
    assert not cores.can_look()
    monkeypatch.undo()
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {3})
    assert not cores.can_look()


def test_the_table_says_where_they_were() -> None:
    assert "57 to 500 ns" in in_words([HERE, 57e-9, THERE])
    assert f"{FAR * 1e9:.0f} ns" in in_words([HERE])
    assert "1 of 3 turns" in in_words([HERE, 57e-9, THERE])
