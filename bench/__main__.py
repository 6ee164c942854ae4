"""Measure Telegrad, its competitors and the baseline; print one table.

Run `make bench` or `python -m bench`. It also writes results.json and pictures. README.md describes the method and how
to add a row.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.competitors.table import COMPETITORS, add_parent
from bench.machine import in_words, machine
from bench.markdown import markdown
from bench.plots import draw
from bench.processes import nothing_left_behind
from bench.row import Family, Row
from bench.rows.table import FAMILIES
from bench.schedule import Plan, Results, run
from bench.summary import draw_summary
from bench.table import print_table, wide_console
from bench.verdict import RowVerdict, failures, row_verdicts

OUT = Path(__file__).parent / "results"


def main() -> int:
    args = arguments()
    console = wide_console()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.verdict:
        written = json.loads(args.verdict.read_text())
        rows = [RowVerdict.from_json(row) for row in written["rows"]]
        families: Sequence[Family] = FAMILIES
        competitors: list[str] = written["competitors"]
        about = written["machine"]
    else:
        families, competitors = args.families, args.competitors
        about, start = machine(), time.monotonic()
        plan = Plan(
            {name: COMPETITORS[name] for name in competitors},
            [row for family in families for row in family.rows],
            args.rounds,
            quick=args.quick,
            full=args.full,
        )

        def save(results: Results) -> None:
            seconds = round(time.monotonic() - start)
            write(args.out / "results.json", row_verdicts(families, results), competitors, about, args.rounds, seconds)

        with nothing_left_behind():
            results = run(plan, tell, save)
        rows = row_verdicts(families, results)
        tell(f"{time.monotonic() - start:.0f} s; results.json and pictures are in {args.out}")
    draw(rows, families, args.out)
    draw_summary(rows, args.out / "summary.svg")
    if args.markdown:
        args.markdown.write_text(markdown(rows, families, competitors, about))
    print_table(rows, families, competitors, console)
    console.print(f"[dim]{in_words(about)}[/]", soft_wrap=True)
    verdicts = [verdict.met for row in rows for verdict in row.verdicts if verdict.met is not None]
    console.print(f"{sum(verdicts)} of {len(verdicts)} goals met")
    found = failures(rows)
    for line in found:
        console.print(f"[red]{line}[/]", soft_wrap=True)
    return 1 if found and args.check else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="the rows with TEXT in their name, or a family of rows: "
        f"{', '.join(family.name for family in FAMILIES)}; repeatable",
    )
    parser.add_argument("--competitors", metavar="NAME,...", help=f"only these; there are {', '.join(COMPETITORS)}")
    parser.add_argument("--parent", type=Path, metavar="CHECKOUT", help="measure another checkout of Telegrad, too")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of fresh processes (3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="small rows, few samples: does it all run?")
    parser.add_argument("--full", action="store_true", help="four times as long for every row")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="for results.json and pictures")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a competitor is faster, or a row of Telegrad failed"
    )
    parser.add_argument("--verdict", type=Path, metavar="JSON", help="show the verdicts on an earlier run")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown too")
    args = parser.parse_args()

    if args.parent:
        try:
            add_parent(str(args.parent.resolve()))
        except FileNotFoundError as e:
            parser.error(str(e))
    args.competitors = args.competitors.split(",") if args.competitors else list(COMPETITORS)
    if unknown := set(args.competitors) - set(COMPETITORS):
        parser.error(f"no such competitor: {', '.join(sorted(unknown))}")
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.families = [chosen for family in FAMILIES if (chosen := choose(family, args.only, args.quick)).rows]
    if args.rounds < 1 or not args.families:
        parser.error("there is nothing to measure")
    return args


def choose(family: Family, texts: Sequence[str] | None, quick: bool) -> Family:
    """Return the family with the selected rows."""
    names = {one.name for one in FAMILIES}

    def asked_for(row: Row) -> bool:
        return not texts or any(text == family.name if text in names else text in row.name for text in texts)

    rows = [row for row in family.rows if (row.quick or not quick) and asked_for(row)]
    return replace(family, rows=tuple(rows))


def write(
    path: Path, rows: Sequence[RowVerdict], competitors: Sequence[str], about: Any, rounds: int, seconds: int
) -> None:
    content = {
        "machine": about,
        "rounds": rounds,
        "took seconds": seconds,
        "competitors": list(competitors),
        "rows": [row.as_json() for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
