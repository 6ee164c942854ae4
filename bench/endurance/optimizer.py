"""Cost of safety with several trainers (docs/optim.md).

It runs in one process without calls and measures a handler, an operation and a step.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn, optim

from telegrad.autograd.consistency.saved_tensors import protect
from telegrad.optim.local import LocalOptimizer
from telegrad.types import WorkerInfo

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "8 of 16 elements": [(4, 4)] * 8,
    "those of a ConvNet": [(32, 1, 3, 3), (64, 32, 3, 3), (128, 9216), (10, 128)],
}
MICROSECOND = 1e-6


class OneWorker:
    """Subset of a worker that optimizers use."""

    def __init__(self) -> None:
        self.info = WorkerInfo("one", 0)
        self.attachments: dict[str, Any] = {}


def microseconds(function: Callable[[], object], repeats: int, batch: int = 1) -> float:
    """Return the median time of one call, measured in batches."""
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(batch):
            function()
        samples.append((time.perf_counter() - begin) / batch)
    return statistics.median(samples) / MICROSECOND


def make_parameters(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=300, metavar="N", help="samples per median (default 300)")
    repeats = parser.parse_args().repeats
    if repeats < 1:
        parser.error("there is nothing to measure")
    torch.set_num_threads(1)
    worker = OneWorker()
    protection = protect(worker)
    a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def run() -> None:
        with protection.handler_guard(1):
            pass

    table = Table("step", "torch, µs", "telegrad, µs", title="Cost of several trainers")
    table.add_row("the run of a handler in a context", "-", f"{microseconds(run, repeats, 100):.1f}")
    times = []
    for guard in (nullcontext(), protection.handler_guard(1)):
        with guard:
            times.append(microseconds(lambda: a * b, repeats, 100))
    table.add_row("an operation that saves two tensors", *(f"{one:.1f}" for one in times))
    for name, shapes in SHAPES.items():
        for cls in (optim.SGD, optim.Adam):
            ours, theirs = make_parameters(shapes), make_parameters(shapes)
            gradients: dict[torch.Tensor, torch.Tensor] = {one: torch.randn_like(one) for one in ours}
            for one, gradient in zip(theirs, gradients.values(), strict=True):
                one.grad = gradient
            local, plain = (
                LocalOptimizer(worker, cls, [({}, ours, None)], False, (), {"lr": 0.01}),
                cls(theirs, lr=0.01),
            )
            held: list[torch.Tensor] = []

            def step() -> None:
                local.step(1, gradients)  # noqa: B023  # called in this round

            def step_in_use() -> None:
                held[:] = [one.detach() for one in ours]  # noqa: B023
                step()

            alone = microseconds(plain.step, repeats)
            table.add_row(f"a step of {cls.__name__}, {name}", f"{alone:.0f}", f"{microseconds(step, repeats):.0f}")
            table.add_row("  all in use by others", "", f"{microseconds(step_in_use, repeats):.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
