"""Pipeline parallelism: a residual network in stages, fed with micro-batches.

    python examples/pipeline.py --stages 2

Each stage is on its own worker. Without a pipeline, distributed autograd sends a batch through one stage after the
other and back: one works, all others wait. `telegrad.nn.Pipeline` cuts the batch, and every stage runs a schedule such
as 1F1B: after a few forward passes, one backward and one forward pass in turn. So all stages work, and keep few
activations. Stages pass on their results by calling each other. Status 1 if the two ways give different gradients, or
less than 95 % of the held-out digits are recognized at the end.
"""

import argparse
import time
from statistics import median

import torch
import torch.nn.functional as F
from common.digits import load_digits
from common.launch import arguments, launch
from common.networks import residual_network
from common.view import Score, Span, View, new_figure, save, timeline
from torch import Tensor, nn

from telegrad import autograd as dist_autograd
from telegrad import rpc
from telegrad.nn import Pipeline
from telegrad.optim import DistributedOptimizer

BATCH, MICRO_BATCHES = 128, 8
COLD = 5  # first steps, which are not measured
MEASURED = 20  # steps under each schedule of the figure


def make_stage(stage: int, stages: int, seed: int) -> nn.Module:
    """Return consecutive layers of the network, on the worker `stage0`, `stage1`, ..."""
    layers = residual_network(seed)
    begin, end = (i * len(layers) // stages for i in (stage, stage + 1))
    return nn.Sequential(*layers[begin:end])


def run_stage(module: rpc.RRef[nn.Module], x: rpc.RRef[Tensor]) -> Tensor:
    return module.local_value()(x.to_here())


def forward(pipe: Pipeline, images: Tensor) -> Tensor:
    """Run the stages one after the other, recorded by distributed autograd."""
    x = rpc.RRef(images)
    for stage in pipe.stages:
        x = rpc.remote(stage.on, run_stage, (stage.module_rref, x))  # it fetches x from the previous one
    return x.to_here()


def distance(module: rpc.RRef[nn.Module], context_id: int) -> float:
    """Return the relative distance of the pipeline's gradients from the context's."""
    expected = dist_autograd.get_gradients(context_id)
    pairs = [(parameter.grad, expected[parameter]) for parameter in module.local_value().parameters()]
    return max(((mine - other).abs().max() / other.abs().max()).item() for mine, other in pairs)


def passes(pipe: Pipeline, schedule: str, steps: int, images: Tensor, labels: Tensor) -> list[tuple[str, list[Span]]]:
    """Return the passes of each stage, in the fastest of `steps` under a schedule."""
    other = Pipeline(list(pipe.stages), F.cross_entropy, micro_batches=MICRO_BATCHES, schedule=schedule)
    found = []
    for _ in range(steps):
        other.step(images, target=labels)
        found.append(other.times)
    stages = min(found, key=lambda times: times.elapsed).stages
    return [(f"stage {i}", [(str(one.of), one.begin, one.end) for one in each]) for i, each in enumerate(stages)]


def master(args: argparse.Namespace) -> bool:
    pipe = Pipeline(
        [(f"stage{i}", make_stage, (i, args.stages, args.seed)) for i in range(args.stages)],
        F.cross_entropy,
        micro_batches=MICRO_BATCHES,
        schedule=args.schedule,
    )
    optimizer = DistributedOptimizer(torch.optim.Adam, pipe.parameter_rrefs(), lr=0.002)
    digits, apart = load_digits(data="digits"), 0.0
    alone, piped, bubbles, balanced = list[float](), list[float](), list[float](), list[float]()
    title = f"Residual network in {args.stages} stages, {MICRO_BATCHES} micro-batches of {BATCH // MICRO_BATCHES}"
    with View(title, args.steps) as view:
        for step in range(1, args.steps + 1):
            chosen = torch.randperm(len(digits.labels))[:BATCH]
            images, labels = digits.images[chosen], digits.labels[chosen]
            optimizer.zero_grad()
            with dist_autograd.context() as context_id:
                begin = time.monotonic()
                dist_autograd.backward(context_id, [F.cross_entropy(forward(pipe, images), labels)])
                middle = time.monotonic()
                pipe.step(images, target=labels)
                end = time.monotonic()
                for stage in pipe.stages:
                    apart = max(apart, rpc.rpc_sync(stage.on, distance, (stage.module_rref, context_id)))
            optimizer.step()
            alone.append(1000 * (middle - begin))
            piped.append(1000 * (end - middle))
            times = pipe.times
            bubbles.append(times.bubble)
            balanced.append(times.balanced_bubble)
            for i, each in enumerate(times.stages):
                busy = sum(one.end - one.begin for one in each) / times.elapsed
                view.worker(f"stage {i}", args.schedule, passes=f"{len(each)} a step", busy=f"{busy:.0%}")
            shown = {"without_pipeline": f"{alone[-1]:.0f} ms", "with_it": f"{piped[-1]:.0f} ms"}
            view.row(step=f"{step}", **shown, bubble=f"{bubbles[-1]:.0%}", gradients_apart=f"{apart:.0e}")
    accuracy = digits.accuracy(pipe.eval())
    figure, (first, second) = new_figure(title, panels=2, columns=1, height=2.2)
    second.sharex(first)
    for axes, schedule in ((first, "gpipe"), (second, "1f1b")):
        rows = passes(pipe.train(), schedule, min(MEASURED, args.steps), images, labels)
        timeline(axes, f"{schedule}: F forward, B backward", rows)
    view.print(f"Figure: {save(figure, args.out, 'pipeline')}")
    if args.steps >= 3 * COLD:
        slow, fast = median(alone[COLD:]), median(piped[COLD:])
        view.print(
            f"A step takes {slow:.0f} ms without a pipeline, {fast:.0f} ms with it: {slow / fast:.2f} times as fast"
        )
        found, ideal, own = median(bubbles[COLD:]), times.ideal_bubble, median(balanced[COLD:])
        view.print(
            f"Bubble: {found:.1%} of a step; in theory {ideal:.1%} with equal stages, {own:.1%} with the times of these"
            f" passes. A step takes {(1 - ideal) / (1 - found) - 1:.1%} longer than in theory"
        )
    score = Score(accuracy, args.goal, digits.guess)
    return view.verdict(score.reached and apart < 1e-3, f"{score}; gradients at most {apart:.0e} apart")


def run_worker(rank: int, args: argparse.Namespace) -> bool:
    rpc.init_rpc(f"stage{rank - 1}" if rank else "master", rank=rank, world_size=args.stages + 1)
    reached = True if rank else master(args)
    rpc.shutdown()
    return reached


if __name__ == "__main__":
    parser = arguments(__doc__, goal=0.95)
    parser.add_argument("--stages", type=int, default=2, help="(2)")
    parser.add_argument("--steps", type=int, default=60, help="batches to train (60)")
    parser.add_argument("--schedule", default="eager-1f1b", help="gpipe, 1f1b or eager-1f1b, the default")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.goal = 3, 0.2
    launch(run_worker, args.stages + 1, args)
