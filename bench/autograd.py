"""Distributed autograd: Telegrad beside torch.distributed.autograd, on the same work in the same run.

Both packages run the same code in turn, in fresh groups of processes, round after round, as in latency.py. Where a row
has the same work in one process beside it, the two alternate, and what counts is what a framework adds to it. Nothing
is asserted but with --check (our bookkeeping in the backward pass of a graph of 500 nodes) and --contexts (memory).
"""

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import MODULES, SERVER, in_group, machine, p99
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from training import Clock, ConvNet, Framework, Server, Step, as_is, chain, local_step, remote_step, train_together

BATCHES = (1, 8, 32)
NODES = (100, 1000, 10_000, 100_000)
CHECKED = "500 nodes, 64x512"  # 100 layers, 5 nodes each
ALLOWED = 0.1  # share of the backward pass that our bookkeeping may have there
MEMORY_GOAL = 0.05  # growth of resident memory over all contexts

Pair = tuple[Step, Step | None]  # a step, and the same in this process


@dataclass(frozen=True)
class Row:
    """One thing to measure; `prepare` runs in the client, and checks that the gradients are right."""

    name: str
    prepare: Callable[[Framework], Pair]
    repeats: int  # in each round
    workers: int = 2
    goal: float | None = None  # how many times faster than torch we mean to be, or to add less
    nodes: int = 0  # of its graph, where the cost of one is of interest


def one_pass(framework: Framework, x: Tensor, forward: Callable[[], Tensor], whole: bool = True) -> Step:
    """A forward and a backward pass in a context of its own; timed are both, or the backward pass alone."""

    def step(clock: Clock) -> Tensor:
        idle = Clock()
        with framework.one_pass(clock if whole else idle) as context:
            with clock if whole else idle:
                loss = forward().sum()
            with clock:
                framework.autograd.backward(context, [loss])
            gradient: Tensor = framework.autograd.get_gradients(context)[x]
        return gradient

    return step


def checked(step: Step, expected: Tensor) -> Step:
    if not torch.allclose(step(Clock()), expected):  # type: ignore[arg-type]
        raise AssertionError("the gradient is not what it should be")
    return step


def one_call(framework: Framework) -> Pair:
    x, w = torch.rand(32, 32, requires_grad=True), torch.rand(32, 32)
    step = one_pass(framework, x, lambda: framework.rpc.rpc_sync(SERVER, torch.mm, args=(x, w)))
    return checked(step, torch.ones(32, 32) @ w.t()), None


def four_workers(framework: Framework) -> Pair:
    x = torch.rand(32, 32, requires_grad=True)
    arguments = (framework.package, [2, 3], x)
    step = one_pass(framework, x, lambda: framework.rpc.rpc_sync(SERVER, chain, args=arguments))
    return checked(step, torch.full((32, 32), 8.0)), None


def conv_net(batch: int, framework: Framework) -> Pair:
    server = framework.rpc.remote(SERVER, Server, args=(framework.package, ConvNet))
    return remote_step(framework, server, batch), local_step(batch)


def table_of_embeddings() -> nn.Module:
    return nn.EmbeddingBag(10_000, 64, mode="sum", sparse=True)


def embedding(framework: Framework) -> Pair:
    server = framework.rpc.remote(SERVER, Server, args=(framework.package, table_of_embeddings))
    bags = torch.randint(0, 10_000, (32, 16), generator=torch.Generator().manual_seed(2))
    local = table_of_embeddings()

    def step(clock: Clock) -> None:
        with clock, framework.autograd.context() as context:
            framework.autograd.backward(context, [server.rpc_sync().forward(bags).sum()])

    def here(clock: Clock) -> None:
        with clock:
            local.zero_grad()
            local(bags).sum().backward()

    return step, here


def small_nodes(count: int, framework: Framework) -> Pair:
    """A graph of many nodes that do nearly nothing, behind one call."""
    return behind_one_call(framework, torch.rand(4, requires_grad=True), partial(grow, count))


def grow(count: int, x: Tensor) -> Tensor:
    for _ in range(count // 2):
        x = x * 1.0 + 0.0
    return x


def layers(framework: Framework) -> Pair:
    """A graph of 500 nodes that work: Linear and ReLU, a hundred times."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(512, 512), nn.ReLU())))
    return behind_one_call(framework, torch.rand(64, 512, requires_grad=True), model)


def behind_one_call(framework: Framework, x: Tensor, graph: Callable[[Tensor], Tensor]) -> Pair:
    """The backward pass alone, of a graph on this worker that begins with what a call returned."""
    step = one_pass(framework, x, lambda: graph(framework.rpc.rpc_sync(SERVER, as_is, args=(x,))), whole=False)
    leaves = [x, *(graph.parameters() if isinstance(graph, nn.Module) else ())]

    def here(clock: Clock) -> Tensor:
        loss = graph(x).sum()
        with clock:
            gradients = torch.autograd.grad(loss, leaves)
        return gradients[0]

    return checked(step, here(Clock())), here  # type: ignore[arg-type]


ROWS = [
    Row("forward-backward over a call, 32x32", one_call, 100, goal=4),
    Row("forward-backward over 4 workers", four_workers, 60, workers=4),
    *(Row(f"ConvNet step, batch {batch}", partial(conv_net, batch), 30, goal=4) for batch in BATCHES),
    Row("embedding, sparse gradients", embedding, 60),
    *(
        Row(f"backward, {count:,} nodes", partial(small_nodes, count), max(3, 20_000 // count), nodes=count)
        for count in NODES
    ),
    Row(f"backward, {CHECKED}", layers, 10),
]


def measure(rpc: ModuleType, package: str, selected: list[tuple[str, int]]) -> dict[str, Any]:
    """`{row: [[seconds of the step, seconds of the same here or None], ...]}`; runs in the client."""
    rows = {row.name: row for row in ROWS}
    samples: dict[str, Any] = {}
    for name, repeats in selected:
        step, here = rows[name].prepare(Framework(package))
        warm_up = max(repeats // 10, 1)
        pairs = [(seconds(step), None if here is None else seconds(here)) for _ in range(warm_up + repeats)]
        samples[name] = pairs[warm_up:]
        gc.collect()
    return samples


def seconds(step: Step) -> float:
    clock = Clock()
    step(clock)
    return clock.seconds


def run_rounds(packages: list[str], rows: list[Row], rounds: int, quick: bool) -> dict[str, Any]:
    """`{row: {package: pairs of all rounds}}`."""
    samples: dict[str, dict[str, list[Any]]] = {row.name: {package: [] for package in packages} for row in rows}
    for number in range(rounds):
        for workers in sorted({row.workers for row in rows}):
            selected = [
                (row.name, min(row.repeats, 3) if quick else row.repeats) for row in rows if row.workers == workers
            ]
            for package in packages if number % 2 == 0 else packages[::-1]:
                found = in_group(package, measure, package, selected, workers=workers)
                for name, pairs in found.items():
                    samples[name][package] += pairs
    return samples


def figures(pairs: list[tuple[float, float | None]]) -> dict[str, Any]:
    """Of one row and package, in seconds. `added` is the median of what a step takes longer than the same here."""
    steps = [step for step, _ in pairs]
    result = {"median": statistics.median(steps), "p99": p99(steps), "samples": len(steps)}
    both = [(step, here) for step, here in pairs if here is not None]
    if both:
        result["here"] = statistics.median(here for _, here in both)
        result["added"] = statistics.median(step - here for step, here in both)
        result["share"] = statistics.median((step - here) / step for step, here in both)
    return result


def evaluate(rows: list[Row], samples: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows as they are printed and written; `ratio` compares what is added where that is known, else medians."""
    results = []
    for row in rows:
        found = {package: figures(pairs) for package, pairs in samples[row.name].items()}
        result: dict[str, Any] = {"row": row.name, "goal": row.goal, "nodes": row.nodes} | found
        if len(found) == 2:
            key = "added" if "added" in found["torch"] else "median"
            theirs, ours = found["torch"][key], found["telegrad"][key]
            if theirs > 0 and ours > 0:  # else the machine was too busy to tell what is added
                result["ratio"] = theirs / ours
        results.append(result)
    return results


def show(results: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Median times; where the same work in one process stands beside, what a framework adds to it")
    headings = ("", "here", "torch", "p99", "adds", "telegrad", "p99", "adds", "share", "torch / telegrad", "goal")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for result in results:
        here = [result[package]["here"] for package in MODULES if "here" in result.get(package, {})]
        cells = [result["row"], duration(min(here)) if here else ""]
        for package in MODULES:
            found = result.get(package, {})
            cells += [duration(found[key]) if key in found else "" for key in ("median", "p99", "added")]
        share = result.get("telegrad", {}).get("share")
        cells.append("" if share is None else f"{share:.1%}")
        table.add_row(*cells, *judged(result))
    console.print(table)


def show_nodes(results: list[dict[str, Any]], console: Console) -> None:
    """What a node costs, and whether that grows with their number."""
    table = Table(title="The same backward passes, for each node")
    for heading in ("nodes", "here", "torch adds", "telegrad adds"):
        table.add_column(heading, justify="right")
    for result in results:
        found = [result.get(package, {}) for package in MODULES]
        here = [figures["here"] for figures in found if "here" in figures]
        times = [min(here), *(figures.get("added") for figures in found)]
        cells = [f"{time / result['nodes'] * 1e6:.2f} us" if time is not None else "" for time in times]
        table.add_row(f"{result['nodes']:,}", *cells)
    console.print(table)


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if abs(seconds) < 1e-3 else f"{seconds * 1e3:,.2f} ms"


# ---- several trainers, one server


@dataclass(frozen=True)
class Together:
    """Trainers on one ConvNet, all at once. With two we mean to be no slower than torch."""

    trainers: int
    batch: int

    @property
    def name(self) -> str:
        return f"ConvNet, {self.trainers} trainer{'s' * (self.trainers > 1)}, batch {self.batch}"


TOGETHER = [Together(trainers, batch) for trainers in (1, 2) for batch in BATCHES]


def run_trainers(packages: list[str], chosen: list[Together], rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Samples per second, and how many steps failed because another trainer's step came between."""
    results = []
    for case in chosen:
        found: dict[str, list[dict[str, Any]]] = {package: [] for package in packages}
        for number in range(rounds):
            for package in packages if number % 2 == 0 else packages[::-1]:
                arguments = (package, case.trainers, case.batch, 0.3 if quick else 4.0)
                found[package].append(in_group(package, train_together, *arguments, workers=case.trainers + 1))
        result: dict[str, Any] = {"row": case.name, "goal": 1.0 if case.trainers > 1 else None}
        for package, runs in found.items():
            rate = statistics.median(run["samples per second"] for run in runs)
            result[package] = {"samples per second": rate, "steps failed": sum(run["steps overtaken"] for run in runs)}
        if len(found) == 2:
            rates = [result[package]["samples per second"] for package in MODULES]
            result["ratio"] = rates[1] / max(rates[0], 1e-9)
        results.append(result)
    return results


def show_trainers(results: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Samples per second, and steps that failed because another trainer's came between")
    for heading in ("", "torch", "failed", "telegrad", "failed", "telegrad / torch", "goal"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for result in results:
        cells = [result["row"]]
        for package in MODULES:
            found = result.get(package)
            cells += [f"{found['samples per second']:,.0f}", str(found["steps failed"])] if found else ["", ""]
        table.add_row(*cells, *judged(result))
    console.print(table)


def judged(result: dict[str, Any]) -> list[str]:
    """The cells of a ratio and its goal."""
    ratio, goal = result.get("ratio"), result["goal"]
    verdict = f"{goal:g} [{'green]met' if ratio >= goal else 'red]missed'}[/]" if ratio and goal else ""
    return [f"{ratio:.1f}" if ratio else "", verdict]


# ---- many contexts


def open_and_close(rpc: ModuleType, package: str, count: int) -> dict[str, Any]:
    """Opens contexts and closes them, one in a hundred with a pass over a call; what is held before and after."""
    framework = Framework(package)
    x = torch.rand(4, requires_grad=True)
    step = one_pass(framework, x, lambda: rpc.rpc_sync(SERVER, as_is, args=(x,)))

    def run(times: int) -> None:
        for number in range(times):
            if number % 100:
                with framework.autograd.context():
                    pass
            else:
                step(Clock())

    run(max(count // 10, 100))
    before = held(rpc)
    run(count)
    after = held(rpc)
    return {name: {"before": before[name], "after": after[name]} for name in before}


def held(rpc: ModuleType) -> dict[str, float]:
    """Resident MB of both processes."""
    return {"client": resident(), "server": rpc.rpc_sync(SERVER, resident)}


def show_memory(found: dict[str, Any], count: int, console: Console) -> bool:
    """Has memory stayed as it was?"""
    good = True
    for name, memory in found.items():
        console.print(f"{count:,} contexts, {name}: {memory['before']:.0f} MB before, {memory['after']:.0f} MB after")
        good &= memory["after"] <= memory["before"] * (1 + MEMORY_GOAL)
    return good


def resident() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# ---- the program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", action="append", metavar="TEXT", help="only the rows with TEXT in their name; repeatable")
    parser.add_argument("--only", choices=list(MODULES), help="measure one package")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="fresh groups per package (default 3)")
    parser.add_argument("--quick", action="store_true", help="one short round: does it run?")
    parser.add_argument("--check", action="store_true", help=f"only '{CHECKED}': exit with 1 if our share is too large")
    parser.add_argument("--contexts", type=int, metavar="N", help="only open and close N contexts, and look at memory")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures, in seconds, to PATH")
    args = parser.parse_args()
    texts = [CHECKED] if args.check else args.k or [""]
    rows = [row for row in ROWS if any(text in row.name for text in texts)]
    together = [case for case in TOGETHER if any(text in case.name for text in texts)]
    if args.rounds < 1 or not (rows or together) or (args.contexts is not None and args.contexts < 1):
        parser.error("there is nothing to measure")
    alone = args.check or args.contexts
    packages = [args.only or "telegrad"] if args.only or alone else list(MODULES)
    rounds = 1 if args.quick else args.rounds
    console = Console(highlight=False)
    console.width = max(console.width, 200)  # a log file has no width of its own

    written: dict[str, Any] = {"machine": machine(), "unit": "s"}
    if args.contexts:
        written["contexts"] = in_group(packages[0], open_and_close, packages[0], args.contexts)
        good = show_memory(written["contexts"], args.contexts, console)
    else:
        written["results"] = evaluate(rows, run_rounds(packages, rows, rounds, args.quick))
        show(written["results"], console)
        if any(row.nodes for row in rows):
            show_nodes([result for result in written["results"] if result["nodes"]], console)
        written["trainers"] = run_trainers(packages, together, rounds, args.quick)
        if together:
            show_trainers(written["trainers"], console)
        good = not args.check or all(result[packages[0]]["share"] <= ALLOWED for result in written["results"])
    console.print(
        f"{written['machine']['cpu']}, {written['machine']['cores']} cores, torch {torch.__version__}", style="dim"
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(written | {"good": good}, indent=2) + "\n")
    if not good:
        console.print("[red]the goal is missed[/]")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
