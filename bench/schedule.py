"""Schedule of the measurements.

A run has rounds. Each round measures every row for every competitor, each time in fresh processes. The order of the
competitors rotates, so that a slower machine or another program affects all alike. Only one competitor runs at a time,
because an idle torch.distributed.rpc process polls and keeps a core busy. Rows with the same number of workers share a
group, because some competitors take ten seconds to start one; rows that need a fresh group get their own. Every turn
waits for a limited time until the cores of the machine are near to each other: see cores.py.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench import cores
from bench.competitors.base import Client, Competitor, Unsupported
from bench.groups import Failed, group_body, in_leader
from bench.row import BASELINE, BASELINE_WITH, OURS, Row, Samples

START = 90.0  # seconds for a group to start and to end
SHOWN = 160  # characters of a failure in the table


@dataclass
class Results:
    """Samples of each round for each row and competitor, or the reason for none.

    Also the distance of the cores in each turn, and the time that turns waited for near cores.
    """

    rounds: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    absent: dict[str, dict[str, str]] = field(default_factory=dict)
    apart: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    waited: float = 0.0

    def add(self, row: str, name: str, samples: Samples) -> None:
        for owner, found in samples.items():
            key = BASELINE_WITH + name if owner == BASELINE and name != OURS else owner or name
            if found:
                self.rounds.setdefault(row, {}).setdefault(key, []).append(list(found))

    def add_apart(self, row: str, name: str, apart: float, waited: float) -> None:
        self.apart.setdefault(row, {}).setdefault(name, []).append(apart)
        self.waited += waited

    def leave_out(self, row: str, name: str, reason: str) -> None:
        self.absent.setdefault(row, {})[name] = reason


@dataclass(frozen=True)
class Plan:
    competitors: Mapping[str, Competitor]
    rows: Sequence[Row]
    rounds: int
    quick: bool = False
    full: bool = False

    def wait_left(self, results: Results) -> float | None:
        """Return the seconds left to wait for near cores; None if they are not measured."""
        if self.quick or not cores.can_measure():
            return None
        return max(0.0, cores.MAX_TOTAL_WAIT - results.waited)


def run(plan: Plan, tell: Callable[[str], object], save: Callable[[Results], object] = lambda _: None) -> Results:
    """Measure all rows and competitors.

    `tell` gets lines of progress, and `save` the results after each round.
    """
    results = Results()
    competitors = dict(plan.competitors)
    for name, competitor in plan.competitors.items():
        if (reason := competitor.missing()) is not None:
            competitors.pop(name)
            for row in plan.rows:
                results.leave_out(row.name, name, reason)
    for row in plan.rows:
        for name in competitors:
            if (reason := row.unsupported_reason(name)) is not None:
                results.leave_out(row.name, name, reason)
    for number in range(plan.rounds):
        for rows in settings([row for row in plan.rows if row.rounds is None or number < row.rounds]):
            for name in turns([BASELINE, *competitors], number):
                start = time.monotonic()
                wanted = [row for row in rows if wants(row, name, results)]
                if not wanted:
                    continue
                if name == BASELINE:
                    baseline_turn(plan, wanted, results)
                else:
                    turn(plan, competitors[name], wanted, results)
                label = wanted[0].name if len(wanted) == 1 else f"{len(wanted)} rows, {wanted[0].workers} workers"
                tell(f"round {number + 1} of {plan.rounds}, {label}: {name}, {time.monotonic() - start:.1f} s")
        save(results)
    return results


def settings(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows that share a group.

    A row that needs a fresh group, or starts its own processes, is alone.
    """
    shared = [row for row in rows if row.workers and not row.fresh]
    for workers in sorted({row.workers for row in shared}):
        yield [row for row in shared if row.workers == workers]
    for row in rows:
        if row not in shared:
            yield [row]


def turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order of the competitors in a round: rotated, alternately backward."""
    ordered = list(names) if number % 2 == 0 else list(reversed(names))
    by = number // 2 % len(ordered)
    return ordered[by:] + ordered[:by]


def wants(row: Row, name: str, results: Results) -> bool:
    if name == BASELINE:
        return row.baseline is not None and BASELINE not in results.absent.get(row.name, {})
    return name not in results.absent.get(row.name, {})


def baseline_turn(plan: Plan, rows: Sequence[Row], results: Results) -> None:
    for row in rows:
        turn_alone(plan, row, BASELINE, partial(_baseline, row), results)


def _baseline(row: Row, quick: bool, full: bool) -> Samples:
    assert row.baseline is not None
    return {"": list(row.baseline(row.sampler(quick, full)))}


def turn(plan: Plan, competitor: Competitor, rows: Sequence[Row], results: Results) -> None:
    """Run a turn of a competitor.

    A row that fails is skipped from then on; later rows still run.
    """
    if not rows[0].workers:
        turn_alone(plan, rows[0], competitor.name, partial(_alone, rows[0], competitor), results)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found")
        near = plan.wait_left(results)
        main = Measure(tuple(row.name for row in rows), plan.quick, plan.full, found, near)
        reason = None
        try:
            timeout = START + sum(row.timeout for row in rows) + (near or 0.0)
            in_leader(partial(group_body, competitor, rows[0].workers, main), timeout)
        except Failed as e:
            reason = str(e)
        begun = read(found, competitor.name, results)
        if reason is None:
            return
        if begun is not None:
            results.leave_out(begun, competitor.name, f"failed: {shorten(reason)}")
        elif not found.exists():
            for row in rows:
                results.leave_out(row.name, competitor.name, f"cannot connect its workers: {shorten(reason)}")


def turn_alone(plan: Plan, row: Row, name: str, measure: Callable[[bool, bool], Samples], results: Results) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found")
        near = plan.wait_left(results)
        body = partial(_record, row.name, partial(measure, plan.quick, plan.full), found, near, again=row.workers > 0)
        try:
            in_leader(body, 2 * row.timeout + (near or 0.0))
        except Failed as e:
            if read(found, name, results) is not None or not found.exists():
                results.leave_out(row.name, name, f"failed: {shorten(str(e))}")
        else:
            read(found, name, results)


def _alone(row: Row, competitor: Competitor, quick: bool, full: bool) -> Samples:
    return row.measure(competitor, row.sampler(quick, full))


@dataclass(frozen=True)
class Measure:
    """Program of worker 0 in a turn.

    It is sent to competitors' processes, so it has names of rows.
    """

    rows: tuple[str, ...]
    quick: bool
    full: bool
    found: Path
    near: float | None

    def __call__(self, client: Client) -> None:
        from bench.rows.table import ROWS

        near = self.near
        for name in self.rows:
            row = ROWS[name]
            measure = partial(row.measure, client, row.sampler(self.quick, self.full))
            waited = _record(name, measure, self.found, near, again=not row.fresh)
            near = None if near is None else max(0.0, near - waited)


def _record(row: str, measure: Callable[[], Samples], found: Path, near: float | None, *, again: bool) -> float:
    """Add the samples of `measure`, or its error, to a file.

    The file outlives this process. Waits at most `near` seconds for near cores, and measures `again`, if allowed, after
    the cores moved apart. Returns the seconds waited; after a failure, the maximum.
    """
    waited = 0.0 if near is None else min(near, cores.MAX_WAIT)

    def write(record: object) -> None:
        with found.open("a") as file:
            file.write(json.dumps(record) + "\n")

    write({"row": row, "begun": True})
    try:
        if near is None:
            samples, where = measure(), {}
        else:
            steady = cores.near(measure, min(near, cores.MAX_WAIT), again)
            waited = steady.waited
            samples, where = steady.result, {"apart": steady.apart, "waited": waited}
        write({"row": row, "samples": {owner: list(some) for owner, some in samples.items()}, **where})
    except Unsupported as e:
        write({"row": row, "absent": str(e)})
    except Exception as e:
        write({"row": row, "absent": f"failed: {shorten(f'{type(e).__name__}: {e}')}"})
    return waited


def read(found: Path, name: str, results: Results) -> str | None:
    """Read the records of a turn into `results`; return the row without an end."""
    begun = None
    for line in found.read_text().splitlines() if found.exists() else ():
        record = json.loads(line)
        row = record["row"]
        begun = row if "begun" in record else None
        if "samples" in record:
            results.add(row, name, record["samples"])
            if "apart" in record:
                results.add_apart(row, name, record["apart"], record["waited"])
        elif "absent" in record:
            results.leave_out(row, name, record["absent"])
    return begun


def shorten(text: str) -> str:
    """Return the last line with text, which in a traceback is the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    return last if len(last) <= SHOWN else f"{last[:SHOWN]}..."
