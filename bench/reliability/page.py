"""docs/reliability.md from the figures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.machine import in_words

HEAD = """# Reliability

Telegrad is meant to run for months on machines that fail. This page says how often each fault was tried, and how fast
the group notices it. `make reliability` writes it, from its own measurements and from the figures that `make soak` and
`make test-slow` (or `make fuzz`) leave in the build folder. A figure that was not measured is missing, and a goal that
was missed says so.
"""


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def whole(number: float) -> str:
    return f"{number:,.0f}"


def verdict(met: bool) -> str:
    return "yes" if met else "**no**"


def detection(figures: Mapping[str, Any]) -> str:
    what = {
        "local kill": "a call to a worker of the host fails after kill -9",
        "remote silence": "a call over TCP fails after the callee's process stops",
        "join next to a stopped member": "a worker joins while another member is stopped",
        "unauthenticated flood": "small calls, while unauthenticated peers connect to the callee",
    }
    rows = []
    for name, one in figures.items():
        event = what[name] + (f" ({one['note']})" if one["note"] else "")
        numbers = (one[key] for key in ("rounds", "unit", "median", "worst", "goal"))
        rows.append((event, *numbers, verdict(one["met"])))
    return (
        "## How fast faults are noticed\n\n"
        + table(("event", "rounds", "unit", "median", "worst", "goal", "met"), rows)
        + "\nThe worst round has to reach the goal; of the unauthenticated connections, the median of the pairs.\n"
    )


def soak(figures: Mapping[str, Any]) -> str:
    explained = figures["failed by a fault"]
    faults = [(kind, whole(n), whole(explained.get(kind, 0))) for kind, n in figures["faults"].items()]
    operations = [(kind, whole(n)) for kind, n in figures["operations"].items()]
    result = [(key, figures[key]) for key in ("wrong", "lost", "false losses", "other failures")]
    resources = [
        (member, name, one["median"], one["growth"], one["limit"], verdict(one["flat"]))
        for member, found in figures["resources"].items()
        for name, one in found.items()
    ]
    encrypted = "encrypted" if figures["encrypted"] else "plain"
    about = (
        f"`make soak` ran for {figures['seconds'] / 60:.0f} minutes with the seed {figures['seed']}"
        f" ({encrypted} TCP): processes of one host call each other over shared memory and TCP, and every result is"
        " compared with the same computation in one process. An operation fails by a fault if the fault hit one of its"
        " workers at the time. Any other failure counts below.\n"
    )
    trouble = figures["trouble"] or "; ".join(figures["left behind"].values())
    return "\n".join(
        [
            "## Soak\n",
            about,
            table(("fault", "tried", "operations that it failed"), faults),
            table(("operation", "right"), operations),
            table(("result", "number"), result),
            f"Joins: {figures['joins']}, the slowest took {figures['slowest join s']} s."
            + (f" Trouble: {trouble}." if trouble else "")
            + "\n",
            HELD,
            table(("member", "resource", "median", "growth", "limit", "flat"), resources),
        ]
    )


HELD = """What the members that stay hold, after the warm-up: resident memory and what is in use of the C library's
heap, in MB, and blocks of Python's heap, in thousands. Resident memory varies, because free pieces of the heap stay
resident: a leak shows in what is in use.
"""


def fuzzing(figures: Mapping[str, Any]) -> str:
    rows = [
        (name, whole(one["inputs"]), whole(one["edges"]), one["crashes"]) for name, one in figures["targets"].items()
    ]
    return (
        "## Fuzzing\n\n"
        f"Each fuzzer of the core (`csrc/fuzz`) ran for {figures['seconds']} s under the address and"
        " undefined-behavior sanitizers.\n\n" + table(("fuzzer", "inputs", "edges of code", "crashes"), rows)
    )


def schedules(figures: Mapping[str, int]) -> str:
    total = sum(figures.values())
    return (
        "## Explored schedules\n\n"
        "Seeded schedules of the pure protocols, with losses, partitions, resets and restarts (`tests/protocols`):\n\n"
        + table(
            ("schedules of", "number"),
            [*((f"`{name}`", whole(n)) for name, n in figures.items()), ("total", whole(total))],
        )
    )


def tests(figures: Mapping[str, int]) -> str:
    return (
        "## Tests\n\nTest cases by folder. Those of `tests/protocols` explore the pure protocols, the others run on"
        " real processes and on the in-process cluster:\n\n"
        + table(("folder", "cases"), ((f"`{name}`", n) for name, n in figures.items()))
    )


def faults(figures: Sequence[tuple[str, str, int]]) -> str:
    return (
        "## Faults\n\nEach fault that is known to have broken such systems, and how often one run of `make test` and"
        " `make test-slow` has tried it: the passed cases of its tests (`tests/faults/rows.py`), over each transport."
        " The soak tries faults at random, on top of this.\n\n" + table(("row", "fault", "tried"), figures)
    )


def page(figures: Mapping[str, Any]) -> str:
    parts = [HEAD, f"Machine: {in_words(figures['machine'])}. Commit `{figures['commit']}`.\n"]
    writers = (
        ("detection", detection),
        ("soak", soak),
        ("fuzzing", fuzzing),
        ("schedules", schedules),
        ("faults", faults),
        ("tests", tests),
    )
    parts.extend(write(figures[name]) for name, write in writers if figures.get(name))
    return "\n".join(parts)
