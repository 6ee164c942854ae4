"""Who is measured when, and what becomes of peers that fail. The peers are made up: nothing connects anything."""

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
from bench.cores import Found
from bench.groups import Failed, in_leader
from bench.peers.base import Client, Main, Peer, Seat, Unsupported
from bench.processes import Meter, fork, wait
from bench.row import LIMIT, Row, Samples, Take
from bench.rows import table
from bench.schedule import Plan, Results, read, run, settings, turns


class MadeUp(Peer):
    """Runs what worker 0 does in the leader, without any other worker."""

    def __init__(self, name: str, why_missing: str | None = None) -> None:
        self.name, self.about, self._why = name, "", why_missing

    def missing(self) -> str | None:
        return self._why

    def run(self, seats: Sequence[Seat], main: Main) -> None:
        main(self.name)  # type: ignore[arg-type]  # its rows want no client


def named(found: dict[str, float], client: Client, take: Take) -> Samples:
    return {"": [found[str(client)]]}


def unsupported(client: Client, take: Take) -> Samples:
    raise Unsupported("has no such thing")


def dies(client: Client, take: Take) -> Samples:
    if str(client) == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"": [1.0]}


def raises(client: Client, take: Take) -> Samples:
    raise ValueError("no luck")


def measured(rows: list[Row], monkeypatch: pytest.MonkeyPatch, rounds: int = 1) -> tuple[Results, list[str]]:
    """A run of rows over the made-up peers a, b, and c, which is missing."""
    monkeypatch.setattr(table, "ROWS", {row.name: row for row in rows})
    told: list[str] = []
    peers = {"a": MadeUp("a"), "b": MadeUp("b"), "c": MadeUp("c", "not installed")}
    return run(Plan(peers, rows, rounds, quick=True), told.append), told


def test_peers_take_turns_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    results, told = measured([Row("row", partial(named, {"a": 1.0, "b": 2.0}))], monkeypatch, rounds=2)
    assert results.rounds == {"row": {"a": [[1.0], [1.0]], "b": [[2.0], [2.0]]}}
    assert results.absent == {"row": {"c": "not installed"}}
    assert [line.split(": ")[1][0] for line in told] == ["a", "b", "b", "a"]


def test_every_place_in_the_order_is_taken() -> None:
    orders = [turns(["a", "b", "c"], number) for number in range(6)]
    assert orders[0] == ["a", "b", "c"]
    assert orders[1] == ["c", "b", "a"]
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {"a", "b", "c"}


def test_rows_with_as_many_workers_share_a_group() -> None:
    workers = {"a": 2, "b": 0, "c": 8, "d": 2, "e": 0}
    rows = [Row(name, unsupported, workers=count) for name, count in workers.items()]
    rows += [Row(name, unsupported, fresh=True) for name in "fg"]
    shared = [[row.name for row in together] for together in settings(rows)]
    assert shared == [["a", "d"], ["c"], ["b"], ["e"], ["f"], ["g"]]


def test_what_a_peer_lacks_is_shown_and_the_next_row_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("first", unsupported), Row("second", raises), Row("third", partial(named, {"a": 1.0, "b": 1.0}))]
    results, _ = measured(rows, monkeypatch)
    assert results.absent["first"]["a"] == "has no such thing"
    assert results.absent["second"]["b"] == "failed: ValueError: no luck"
    assert results.rounds["third"] == {"a": [[1.0]], "b": [[1.0]]}


def test_a_peer_that_dies_keeps_what_it_had_and_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("before", partial(named, {"a": 1.0, "b": 1.0})), Row("deadly", dies)]
    results, _ = measured(rows, monkeypatch, rounds=2)
    assert results.rounds["before"] == {"a": [[1.0], [1.0]], "b": [[1.0], [1.0]]}
    assert list(results.rounds["deadly"]) == ["a"]
    assert results.absent["deadly"]["b"].startswith("failed: ended with status -9")


def test_rows_may_want_fewer_rounds_and_fewer_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    once = Row("once", partial(named, {"a": 1.0, "b": 1.0}), rounds=1)
    for_a = Row("for a", partial(named, {"a": 1.0}), only={"a": "", "": "is not a"})
    results, _ = measured([once, for_a], monkeypatch, rounds=2)
    assert results.rounds["once"] == {"a": [[1.0]], "b": [[1.0]]}
    assert results.rounds["for a"] == {"a": [[1.0], [1.0]]}
    assert results.absent["for a"]["b"] == "is not a"


def test_the_limit_takes_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("row", partial(named, {"a": 1.0, "b": 1.0}), limit=lambda take: [0.5])
    results, told = measured([row], monkeypatch, rounds=2)
    assert results.rounds["row"][LIMIT] == [[0.5], [0.5]]
    assert len(told) == 6


def test_turns_share_the_time_that_is_waited_for_near_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def near(measure: Any, patience: float, again: bool) -> Found[Samples]:
        return Found(measure(), 500e-9, patience)

    rows = [Row(name, partial(named, {"a": 1.0, "b": 1.0})) for name in ("first", "second")]
    rows.append(Row("fresh", partial(named, {"a": 1.0, "b": 1.0}), fresh=True))
    monkeypatch.setattr(table, "ROWS", {row.name: row for row in rows})
    monkeypatch.setattr(schedule.cores, "near", near)
    monkeypatch.setattr(schedule.cores, "can_look", lambda: True)
    monkeypatch.setattr(schedule.cores, "IN_ALL", 2.5 * schedule.cores.PATIENCE)
    plan = Plan({"a": MadeUp("a"), "b": MadeUp("b")}, rows, 1)
    results = run(plan, lambda _: None)
    assert results.apart == {row.name: {"a": [500e-9], "b": [500e-9]} for row in rows}
    assert results.waited == 2.5 * schedule.cores.PATIENCE
    assert replace(plan, quick=True).patience(results) is None
    monkeypatch.setattr(schedule.cores, "can_look", lambda: False)
    assert plan.patience(Results()) is None


def test_rows_that_fail_do_not_wait_longer_than_the_turn_may(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waited = []

    def near(measure: Any, patience: float, again: bool) -> Found[Samples]:
        waited.append(patience)
        return Found(measure(), 500e-9, patience)

    rows = [Row(name, unsupported) for name in ("first", "second", "third")]
    monkeypatch.setattr(table, "ROWS", {row.name: row for row in rows})
    monkeypatch.setattr(schedule.cores, "near", near)
    patience = 1.5 * schedule.cores.PATIENCE
    schedule.Measure(tuple(table.ROWS), False, False, tmp_path / "found", patience)("a")  # type: ignore[arg-type]
    assert sum(waited) == patience


def test_a_half_written_row_is_the_one_that_failed(tmp_path: Path) -> None:
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
    """What a daemon does: a child that its parent leaves behind, in a session of its own."""
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


def test_a_leader_takes_all_it_started_with_it(tmp_path: Path) -> None:
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


def works(told: int, tell: int) -> None:
    """Works when told, says so, and stays until it is told again."""
    os.read(told, 1)
    spend(0.05)
    os.write(tell, b".")
    os.read(told, 1)


def spend(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_meter_counts_others_whenever_they_came_and_not_who_measures() -> None:
    orders, (hear, tell) = [os.pipe(), os.pipe()], os.pipe()
    pids = [os.getpid(), fork(partial(works, orders[0][0], tell))]
    meter, whole = Meter(lambda: pids, but_here=True), Meter(lambda: pids)
    assert meter.seconds() < 0.01
    pids.append(fork(partial(works, orders[1][0], tell)))
    try:
        spend(0.2)
        for _, order in orders:
            os.write(order, b".")
        assert os.read(hear, 1) + os.read(hear, 1) == b".."
        assert 0.1 <= meter.seconds() < 0.2
        assert whole.seconds() >= 0.3
    finally:
        for _, order in orders:
            os.write(order, b".")
        assert [wait(pid, 30) for pid in pids[1:]] == [0, 0]
        for end in (hear, tell, *orders[0], *orders[1]):
            os.close(end)
