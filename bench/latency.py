"""Telegrad beside torch.distributed.rpc: how long calls take between two processes of this machine.

Both packages run the same code in turn, in fresh groups of two processes, round after round, so that a machine that
slows down or speeds up does it to both. Nothing here is asserted: figures are for people, see README.md.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import MODULES, SERVER, Counter, identity, in_group, machine, summary
from rich.console import Console
from rich.table import Table

KB, MB = 1 << 10, 1 << 20
IN_FLIGHT = 1000
WARM_UP = 0.2  # seconds for each row in each round; connections, caches, pooled memory and spinning settle

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One thing to measure. `prepare(rpc)` returns the call to time; the call returns `expected`."""

    name: str
    prepare: Callable[[ModuleType], Call]
    expected: object
    repeats: int  # in each round
    calls: int = 1  # remote calls in one repeat
    goal: float | None = None  # how many times faster than torch we mean to be


def sync(func: Callable[..., object], *args: object) -> Callable[[ModuleType], Call]:
    return lambda rpc: lambda: rpc.rpc_sync(SERVER, func, args=args)


def remote(value: object) -> Callable[[ModuleType], Call]:
    return lambda rpc: lambda: rpc.remote(SERVER, identity, args=(value,)).to_here()


def method(rpc: ModuleType) -> Call:
    counter = rpc.remote(SERVER, Counter)
    return lambda: counter.rpc_sync().add(0)


def in_flight(rpc: ModuleType) -> Call:
    return lambda: torch.futures.wait_all([rpc.rpc_async(SERVER, identity, args=(i,)) for i in range(IN_FLIGHT)])


def sized(label: str, size: int, repeats: int, goal: float | None = None) -> Row:
    expected = torch.zeros(1).expand(size // 4)  # one number, shown many times

    def prepare(rpc: ModuleType) -> Call:
        return sync(identity, expected.clone(memory_format=torch.contiguous_format))(rpc)

    return Row(f"identity, {label}", prepare, expected, repeats, goal=goal)


PAIR = torch.tensor([1.0, 2.0])
ROWS = [
    Row("torch.add, 2 floats", sync(torch.add, PAIR, PAIR), PAIR + PAIR, 200),
    Row("identity, int", sync(identity, 7), 7, 200, goal=25),
    Row("identity, 2 floats", sync(identity, PAIR), PAIR, 200, goal=20),
    Row("remote().to_here(), 2 floats", remote(PAIR), PAIR, 200),
    Row("RRef method, int", method, 0, 200),
    Row("1000 async calls, int", in_flight, list(range(IN_FLIGHT)), 4, calls=IN_FLIGHT, goal=20),
    sized("4 KB", 4 * KB, 200),
    sized("64 KB", 64 * KB, 100),
    sized("1 MB", MB, 40),
    sized("4 MB", 4 * MB, 20, goal=1.5),
    sized("40 MB", 40 * MB, 5),
    sized("400 MB", 400 * MB, 2, goal=1),
]


def measure(rpc: ModuleType, selected: list[tuple[str, int]], warm_up: float) -> dict[str, list[float]]:
    """Seconds per repeat, by row; runs in the client. `selected` holds names of rows and their numbers of repeats."""
    rows = {row.name: row for row in ROWS}
    seconds: dict[str, list[float]] = {}
    for name, repeats in selected:
        row = rows[name]
        call = row.prepare(rpc)
        start = time.perf_counter()
        result = call()
        while time.perf_counter() < start + warm_up:
            result = call()
        if not same(result, row.expected):
            raise AssertionError(f"{name}: the call returned something else than it should")
        del result
        seconds[name] = [timed(call) for _ in range(repeats)]
    return seconds


def timed(call: Call) -> float:
    start = time.perf_counter()
    call()  # the time includes freeing the result
    return time.perf_counter() - start


def same(result: object, expected: object) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(result, torch.Tensor) and torch.equal(result, expected)
    return result == expected


def run_rounds(packages: list[str], rows: list[Row], rounds: int, quick: bool) -> dict[str, Any]:
    """Samples of all rounds in seconds: `{row: {package: [...]}}`."""
    selected = [(row.name, min(row.repeats, 3) if quick else row.repeats) for row in rows]
    warm_up = 0.0 if quick else WARM_UP
    samples: dict[str, dict[str, list[float]]] = {row.name: {package: [] for package in packages} for row in rows}
    for number in range(rounds):
        for package in packages if number % 2 == 0 else packages[::-1]:
            for name, seconds in in_group(package, measure, selected, warm_up).items():
                samples[name][package] += seconds
    return samples


def evaluate(rows: list[Row], samples: dict[str, Any]) -> list[dict[str, Any]]:
    """Median, p99 and ratio of medians for each row, as they are printed and written."""
    results = []
    for row in rows:
        result: dict[str, Any] = {"row": row.name, "calls": row.calls, "goal": row.goal}
        result |= {package: summary(seconds) for package, seconds in samples[row.name].items()}
        if "torch" in result and "telegrad" in result:
            result["ratio"] = result["torch"]["median"] / result["telegrad"]["median"]
        results.append(result)
    return results


def show(results: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Time for a call between two processes, median and 99th percentile")
    for heading in ("", "torch", "p99", "telegrad", "p99", "torch / telegrad", "goal"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for result in results:
        cells = [result["row"]]
        for package in ("torch", "telegrad"):
            figures = result.get(package)
            cells += [duration(figures["median"]), duration(figures["p99"])] if figures else ["", ""]
        ratio, goal = result.get("ratio"), result["goal"]
        cells.append(f"{ratio:.1f}" if ratio else "")
        cells.append(f"{goal:g} [{'green]met' if ratio >= goal else 'red]missed'}[/]" if ratio and goal else "")
        table.add_row(*cells)
        if result["calls"] > 1:
            medians = [result[package]["median"] if package in result else None for package in ("torch", "telegrad")]
            rates = [f"{result['calls'] / median:,.0f}" if median else "" for median in medians]
            table.add_row("  calls per second", rates[0], "", rates[1])
    console.print(table)


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", action="append", metavar="TEXT", help="only the rows with TEXT in their name; repeatable")
    parser.add_argument("--only", choices=list(MODULES), help="measure one package")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="fresh groups per package (default 5)")
    parser.add_argument("--quick", action="store_true", help="one short round without large tensors: does it run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures, in seconds, to PATH")
    args = parser.parse_args()
    rows = [row for row in ROWS if not args.k or any(text in row.name for text in args.k)]
    if args.quick:
        rows = [row for row in rows if row.name not in ("identity, 40 MB", "identity, 400 MB")]
    if not rows or args.rounds < 1:
        parser.error("there is nothing to measure")

    packages = [args.only] if args.only else list(MODULES)
    samples = run_rounds(packages, rows, 1 if args.quick else args.rounds, args.quick)
    results = evaluate(rows, samples)
    about = machine()
    console = Console(highlight=False)
    console.width = max(console.width, 120)  # a log file has no width of its own
    show(results, console)
    console.print(f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}", style="dim")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": about, "unit": "s", "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
