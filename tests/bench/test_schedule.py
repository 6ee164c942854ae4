"""Order of the measurements, and handling of competitors that fail.

The competitors are fakes and connect nothing.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from bench import schedule
from bench.competitors.base import Client, Competitor, Main, Seat, Unsupported
from bench.cores import Found
from bench.groups import Failed, in_leader
from bench.processes import Meter, fork, wait
from bench.row import BASELINE, Row, Sampler, Samples
from bench.rows import table
from bench.schedule import Plan, Results, read, run, settings, turns


class FakeCompetitor(Competitor):
    """Competitor that runs worker 0 in the leader, without other workers."""

    def __init__(self, name: str, reason: str | None = None) -> None:
        self.name, self.about, self._reason = name, "", reason

    def missing(self) -> str | None:
        return self._reason

    def run(self, seats: Sequence[Seat], main: Main) -> None:
        main(self.name)  # type: ignore[arg-type]  # its rows take the name instead of a client


def named(found: dict[str, float], client: Client, sampler: Sampler) -> Samples:
    return {"": [found[str(client)]]}


def unsupported(client: Client, sampler: Sampler) -> Samples:
    raise Unsupported("has no such thing")


def dies(client: Client, sampler: Sampler) -> Samples:
    if str(client) == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"": [1.0]}


def raises(client: Client, sampler: Sampler) -> Samples:
    raise ValueError("no luck")


def measure_rows(rows: list[Row], monkeypatch: pytest.MonkeyPatch, rounds: int = 1) -> tuple[Results, list[str]]:
    """Run rows over the fake competitors a and b, and c, which is missing."""
    monkeypatch.setattr(table, "ROWS", {row.name: row for row in rows})
    progress: list[str] = []
    competitors = {"a": FakeCompetitor("a"), "b": FakeCompetitor("b"), "c": FakeCompetitor("c", "not installed")}
    return run(Plan(competitors, rows, rounds, quick=True), progress.append), progress


def test_competitors_take_turns_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    results, progress = measure_rows([Row("row", partial(named, {"a": 1.0, "b": 2.0}))], monkeypatch, rounds=2)
    assert results.rounds == {"row": {"a": [[1.0], [1.0]], "b": [[2.0], [2.0]]}}
    assert results.absent == {"row": {"c": "not installed"}}
    assert [line.split(": ")[1][0] for line in progress] == ["a", "b", "b", "a"]


def test_every_competitor_is_first_and_last_once() -> None:
    orders = [turns(["a", "b", "c"], number) for number in range(6)]
    assert orders[0] == ["a", "b", "c"]
    assert orders[1] == ["c", "b", "a"]
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {"a", "b", "c"}


def test_rows_with_equal_worker_counts_share_a_group() -> None:
    workers = {"a": 2, "b": 0, "c": 8, "d": 2, "e": 0}
    rows = [Row(name, unsupported, workers=count) for name, count in workers.items()]
    rows += [Row(name, unsupported, fresh=True) for name in "fg"]
    shared = [[row.name for row in together] for together in settings(rows)]
    assert shared == [["a", "d"], ["c"], ["b"], ["e"], ["f"], ["g"]]


def test_after_an_unsupported_row_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("first", unsupported), Row("second", raises), Row("third", partial(named, {"a": 1.0, "b": 1.0}))]
    results, _ = measure_rows(rows, monkeypatch)
    assert results.absent["first"]["a"] == "has no such thing"
    assert results.absent["second"]["b"] == "failed: ValueError: no luck"
    assert results.rounds["third"] == {"a": [[1.0]], "b": [[1.0]]}


def test_a_killed_competitor_keeps_its_samples_and_skips_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("before", partial(named, {"a": 1.0, "b": 1.0})), Row("deadly", dies)]
    results, _ = measure_rows(rows, monkeypatch, rounds=2)
    assert results.rounds["before"] == {"a": [[1.0], [1.0]], "b": [[1.0], [1.0]]}
    assert list(results.rounds["deadly"]) == ["a"]
    assert results.absent["deadly"]["b"].startswith("failed: ended with status -9")


def test_rows_may_want_fewer_rounds_and_fewer_competitors(monkeypatch: pytest.MonkeyPatch) -> None:
    once = Row("once", partial(named, {"a": 1.0, "b": 1.0}), rounds=1)
    for_a = Row("for a", partial(named, {"a": 1.0}), only={"a": "", "": "is not a"})
    results, _ = measure_rows([once, for_a], monkeypatch, rounds=2)
    assert results.rounds["once"] == {"a": [[1.0]], "b": [[1.0]]}
    assert results.rounds["for a"] == {"a": [[1.0], [1.0]]}
    assert results.absent["for a"]["b"] == "is not a"


def test_the_baseline_takes_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("row", partial(named, {"a": 1.0, "b": 1.0}), baseline=lambda sampler: [0.5])
    results, progress = measure_rows([row], monkeypatch, rounds=2)
    assert results.rounds["row"][BASELINE] == [[0.5], [0.5]]
    assert len(progress) == 6


def test_turns_share_the_wait_for_near_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def near(measure: Any, max_wait: float, again: bool) -> Found[Samples]:
        return Found(measure(), 500e-9, max_wait)

    rows = [Row(name, partial(named, {"a": 1.0, "b": 1.0})) for name in ("first", "second")]
    rows.append(Row("fresh", partial(named, {"a": 1.0, "b": 1.0}), fresh=True))
    monkeypatch.setattr(table, "ROWS", {row.name: row for row in rows})
    monkeypatch.setattr(schedule.cores, "near", near)
    monkeypatch.setattr(schedule.cores, "can_measure", lambda: True)
    monkeypatch.setattr(schedule.cores, "MAX_TOTAL_WAIT", 2.5 * schedule.cores.MAX_WAIT)
    plan = Plan({"a": FakeCompetitor("a"), "b": FakeCompetitor("b")}, rows, 1)
    results = run(plan, lambda _: None)
    assert results.apart == {row.name: {"a": [500e-9], "b": [500e-9]} for row in rows}
    assert results.waited == 2.5 * schedule.cores.MAX_WAIT
    assert replace(plan, quick=True).wait_left(results) is None
    monkeypatch.setattr(schedule.cores, "can_measure", lambda: False)
    assert plan.wait_left(Results()) is None


def test_failing_rows_stay_within_the_wait_of_the_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waited = []

    def near(measure: Any, max_wait: float, again: bool) -> Found[Samples]:
        waited.append(max_wait)
        return Found(measure(), 500e-9, max_wait)

    rows = [Row(name, unsupported) for name in ("first", "second", "third")]
    monkeypatch.setattr(table, "ROWS", {row.name: row for row in rows})
    monkeypatch.setattr(schedule.cores, "near", near)
    max_wait = 1.5 * schedule.cores.MAX_WAIT
    schedule.Measure(tuple(table.ROWS), False, False, tmp_path / "found", max_wait)("a")  # type: ignore[arg-type]
    assert sum(waited) == max_wait


def test_a_row_without_end_record_is_the_failed_one(tmp_path: Path) -> None:
    found = tmp_path / "found"
    found.write_text('{"row": "a", "begun": true}\n{"row": "a", "samples": {"": [1]}}\n{"row": "b", "begun": true}\n')
    results = Results()
    assert read(found, "x", results) == "b"
    assert results.rounds == {"a": {"x": [[1]]}}


def test_a_failure_is_shown_by_its_last_line() -> None:
    assert schedule.shorten("Traceback\n  File\nValueError: x\n\n") == "ValueError: x"


# ---- processes


def endless() -> None:
    while True:
        signal.pause()


def detached(pids: Path) -> None:
    """Start a daemon: a child in a session of its own that outlives its parent."""
    child = os.fork()
    if child == 0:
        os.setsid()
        endless()
    with pids.open("a") as file:
        file.write(f"{child}\n")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_leader_ends_all_processes_that_it_started(tmp_path: Path) -> None:
    pids, kept = tmp_path / "pids", fork(endless)
    try:
        in_leader(partial(detached, pids), seconds=30)
        with pytest.raises(Failed, match="hung for 1 s"):
            in_leader(lambda: (detached(pids), endless()), seconds=1)
        with pytest.raises(Failed, match="no luck"):
            in_leader(partial(raises, "client", None), seconds=30)  # type: ignore[arg-type]
        daemons = [int(line) for line in pids.read_text().split()]
        left = [pid for pid in daemons if running(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert len(daemons) == 2
        assert not left
        assert running(kept)
    finally:
        os.kill(kept, signal.SIGKILL)
        assert wait(kept, 10) == -signal.SIGKILL


def work_on_order(orders: int, done: int) -> None:
    """Work on the first order, report it, and exit on the second."""
    os.read(orders, 1)
    spend(0.05)
    os.write(done, b".")
    os.read(orders, 1)


def spend(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_meter_counts_late_processes_but_not_its_own_thread() -> None:
    orders, (reports, done) = [os.pipe(), os.pipe()], os.pipe()
    pids = [os.getpid(), fork(partial(work_on_order, orders[0][0], done))]
    meter, with_self = Meter(lambda: pids, but_here=True), Meter(lambda: pids)
    assert meter.seconds() < 0.01
    pids.append(fork(partial(work_on_order, orders[1][0], done)))
    try:
        spend(0.2)
        for _, order in orders:
            os.write(order, b".")
        assert os.read(reports, 1) + os.read(reports, 1) == b".."
        assert 0.1 <= meter.seconds() < 0.2
        assert with_self.seconds() >= 0.3
    finally:
        for _, order in orders:
            os.write(order, b".")
        assert [wait(pid, 30) for pid in pids[1:]] == [0, 0]
        for end in (reports, done, *orders[0], *orders[1]):
            os.close(end)
