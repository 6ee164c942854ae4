"""The bench waits for near cores, for a limited time. Distances are synthetic."""

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest

pytest.importorskip("rich")

from bench import cores
from bench.cores import FAR, in_words, near

NEAR, DISTANT = 120e-9, 500e-9


def distances(*values: float) -> Callable[[], float]:
    """Return the distances one after the other, then the last one forever."""
    following: Iterator[float] = chain(values, repeat(values[-1]))
    return lambda: next(following)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Synthetic clock, advanced by sleeps and by one second per measurement."""
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


def test_near_cores_need_no_wait(clock: list[float]) -> None:
    found = near(measuring(clock), 20.0, True, distances(NEAR))
    assert (found.result, found.apart, found.waited) == (1, NEAR, 0.0)


def test_measuring_begins_when_cores_are_near(clock: list[float]) -> None:
    found = near(measuring(clock), 20.0, True, distances(DISTANT, DISTANT, DISTANT, NEAR))
    assert (found.result, found.apart) == (1, NEAR)
    assert found.waited == pytest.approx(3 * cores.PAUSE)


def test_wait_ends_and_the_distance_is_reported(clock: list[float]) -> None:
    found = near(measuring(clock), 2.0, True, distances(DISTANT))
    assert (found.result, found.apart) == (1, DISTANT)
    assert 2.0 - cores.PAUSE < found.waited < 2.0 + 2 * cores.PAUSE


def test_a_measurement_is_repeated_if_cores_moved_apart(clock: list[float]) -> None:
    found = near(measuring(clock), 20.0, True, distances(NEAR, DISTANT, DISTANT, NEAR, NEAR))
    assert (found.result, found.apart) == (2, NEAR)
    assert found.waited == pytest.approx(1.0 + cores.PAUSE)


@pytest.mark.parametrize(("max_wait", "again"), [(20.0, False), (1.0, True), (0.0, True)])
def test_no_repeat_if_not_allowed_or_too_late(clock: list[float], max_wait: float, again: bool) -> None:
    found = near(measuring(clock), max_wait, again, distances(NEAR, DISTANT))
    assert (found.result, found.apart, found.waited) == (1, DISTANT, 0.0)


def test_measured_distance_is_a_time() -> None:
    assert 0.0 < cores.apart() < 1.0


def test_no_distance_without_a_compiler_or_with_one_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 3})
    assert cores.can_measure()
    monkeypatch.setenv("CXX", str(tmp_path / "no compiler"))
    monkeypatch.setattr(cores.baseline, "ROOT", tmp_path)
    assert not cores.can_measure()
    monkeypatch.undo()
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {3})
    assert not cores.can_measure()


def test_the_table_reports_the_distances() -> None:
    assert "57 to 500 ns" in in_words([NEAR, 57e-9, DISTANT])
    assert f"{FAR * 1e9:.0f} ns" in in_words([NEAR])
    assert "1 of 3 turns" in in_words([NEAR, 57e-9, DISTANT])
