"""Profiling: where a training step spends its time, on both of its workers.

    python examples/profile_step.py

A residual network is cut in two; the second half is on another worker. Three training steps run under PyTorch's own
profiler, which shows remote calls and backward passes, and their remote operators: `...#remote_op: operator`. The table
is printed. The trace is written for chrome://tracing or ui.perfetto.dev, with both workers on one time axis. Status 1
if calls, backward passes or remote operators are missing from either.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common.digits import load_digits
from common.launch import arguments, launch
from common.networks import residual_network
from common.view import View, new_figure, save
from torch import Tensor, nn
from torch.profiler import profile, record_function

from telegrad import autograd as dist_autograd
from telegrad import rpc
from telegrad.nn import RemoteModule
from telegrad.observe import remote_events
from telegrad.optim import DistributedOptimizer

BATCH = 64


class SecondHalf(nn.Sequential):
    """Second half of the network, on the worker `helper`."""

    def __init__(self, seed: int) -> None:
        layers = residual_network(seed)
        super().__init__(*layers[len(layers) // 2 :])


class Model(nn.Module):
    """Model from digits to scores, with local and remote layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        layers = residual_network(seed)
        self.here = nn.Sequential(*layers[: len(layers) // 2])
        self.there = RemoteModule("helper/cpu", SecondHalf, args=(seed,))
        parameters = self.there.remote_parameters() + [rpc.RRef(parameter) for parameter in self.here.parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)

    def train_step(self, images: Tensor, labels: Tensor) -> float:
        with dist_autograd.context() as context_id:
            with record_function("forward"):
                loss = F.cross_entropy(self.there.forward(self.here(images)), labels)
            with record_function("backward"):
                dist_autograd.backward(context_id, [loss])
            with record_function("optimizer"):
                self.optimizer.step(context_id)
        return loss.item()


def trainer(args: argparse.Namespace) -> bool:
    digits, model = load_digits(data="digits"), Model(args.seed)
    title = f"{args.steps} training steps over two workers, profiled"
    with View(title, args.warm_up + args.steps) as view:

        def train(steps: int) -> None:
            for _ in range(steps):
                chosen = torch.randperm(len(digits.labels))[:BATCH]
                begin = time.perf_counter()
                loss = model.train_step(digits.images[chosen], digits.labels[chosen])
                view.row(
                    step=f"{view.done + 1}", loss=f"{loss:.3f}", time=f"{1000 * (time.perf_counter() - begin):.1f} ms"
                )

        train(args.warm_up)  # the first steps allocate memory and register functions' names
        with profile(record_shapes=True) as prof:
            train(args.steps)

    table = prof.key_averages()
    view.print(table.table(sort_by="cpu_time_total", row_limit=20, max_name_column_width=80))
    args.out.mkdir(parents=True, exist_ok=True)
    trace = args.out / "profile_step.json"
    prof.export_chrome_trace(str(trace))
    view.print(f"Trace: {trace}")
    view.print(f"Figure: {draw(prof, title, args.steps, args.out)}")

    there, text = [event.name for event in remote_events(prof)], trace.read_text()
    roots = {name.partition("#remote_op: ")[0] for name in there}  # calls and backward passes with remote operators
    complete = any(root.startswith("rpc_") for root in roots) and any(root.endswith("::backward") for root in roots)
    complete = complete and all(name in text for name in [*roots, "worker helper"])
    return view.verdict(complete, f"{len(there)} operators of the helper are shown, of {', '.join(sorted(roots))}")


def draw(prof: profile, title: str, steps: int, folder: Path) -> Path:
    """Draw the operators with the most time of their own, on each worker."""
    remote = {id(event) for event in remote_events(prof)}
    totals: dict[tuple[str, str], float] = {}
    for event in prof.events():
        worker = "on the helper" if id(event) in remote else "here"
        key = worker, event.name.rpartition("#remote_op: ")[2]
        totals[key] = totals.get(key, 0.0) + event.self_cpu_time_total / 1000 / steps
    figure, axes = new_figure(title, panels=2)
    for panel, worker in zip(axes, ("here", "on the helper"), strict=True):
        rows = sorted(((ms, name) for (where, name), ms in totals.items() if where == worker), reverse=True)[:12]
        panel.barh([name.removeprefix("torch::distributed::")[:40] for _, name in rows], [ms for ms, _ in rows])
        panel.set(title=worker, xlabel="own time per step [ms]")
        panel.invert_yaxis()
    return save(figure, folder, "profile_step")


def run_worker(rank: int, args: argparse.Namespace) -> bool:
    rpc.init_rpc("helper" if rank else "trainer", rank=rank, world_size=2)
    reached = True if rank else trainer(args)
    rpc.shutdown()
    return reached


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="to profile (3)")
    parser.add_argument("--warm_up", type=int, default=10, help="steps before (10)")
    args = parser.parse_args()
    if args.smoke:
        args.warm_up = 1
    launch(run_worker, 2, args)
