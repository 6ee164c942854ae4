"""Pipeline parallelism: a residual network in stages, fed with micro-batches.

    python examples/pipeline.py --stages 2

Each stage is on its own worker. Without a pipeline, distributed autograd sends a batch through one stage after the
other and back: one works, all others wait. In the pipeline the batch is cut, and every stage runs the 1F1B schedule:
after a few forward passes, one backward and one forward pass in turn. So all stages work, and keep few activations.
Stages pass on their results by calling each other. Status 1 if the two ways give different gradients, or less than 95 %
of the held-out digits are recognized at the end.
"""

import argparse
import time
from queue import SimpleQueue
from statistics import median

import torch
import torch.nn.functional as F
from common.digits import load_digits
from common.launch import arguments, launch
from common.networks import residual_network
from common.view import Score, Span, View, curves, new_figure, save, timeline
from torch import Tensor, nn

from telegrad import autograd as dist_autograd
from telegrad import rpc

BATCH, MICRO_BATCHES = 128, 8
COLD = 5  # first steps, which are not measured


def one_forward_one_backward(stage: int, stages: int) -> list[tuple[str, int]]:
    """Return the order of a stage's passes."""
    ahead = stages - stage
    passes = [("F", i) for i in range(ahead)]
    for i in range(MICRO_BATCHES):
        passes += [("B", i), ("F", i + ahead)]
    return [(kind, i) for kind, i in passes if i < MICRO_BATCHES]


class Stage:
    """Consecutive layers of the network, on the worker `stage0`, `stage1`, ..."""

    def __init__(self, stage: int, stages: int, seed: int) -> None:
        layers = residual_network(seed)
        begin, end = (i * len(layers) // stages for i in (stage, stage + 1))
        self.layers = nn.Sequential(*layers[begin:end])
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=0.002)
        self.order = one_forward_one_backward(stage, stages)
        self.inbox = {(kind, i): SimpleQueue[Tensor]() for kind, i in self.order}

    def forward(self, x: rpc.RRef[Tensor]) -> Tensor:
        return self.layers(x.to_here())

    def put(self, kind: str, i: int, tensor: Tensor) -> None:
        """Add a pass's input ("F"), or its output gradient or last-stage labels ("B")."""
        self.inbox[kind, i].put(tensor)

    def run(self, before: "rpc.RRef[Stage] | None", after: "rpc.RRef[Stage] | None") -> list[Span]:
        """Run all passes of one batch between the neighbors; return their times."""
        self.optimizer.zero_grad()
        saved: dict[int, tuple[Tensor, Tensor]] = {}
        spans = []
        for kind, i in self.order:
            given = self.inbox[kind, i].get(timeout=60)
            begin = time.monotonic()
            if kind == "F":
                saved[i] = given.requires_grad_(), self.layers(given)
                if after:
                    after.rpc_async().put("F", i, saved[i][1].detach())
            else:
                x, y = saved.pop(i)
                if after:
                    y.backward(given)
                else:
                    (F.cross_entropy(y, given) / MICRO_BATCHES).backward()
                if before:
                    before.rpc_async().put("B", i, x.grad)
            spans.append((f"{kind}{i}", begin, time.monotonic()))
        return spans

    def step(self, context_id: int) -> float:
        """Step after a `run`; return its gradients' relative distance from the context's."""
        expected = dist_autograd.get_gradients(context_id)
        pairs = [(parameter.grad, expected[parameter]) for parameter in self.layers.parameters()]
        self.optimizer.step()
        return max(((mine - other).abs().max() / other.abs().max()).item() for mine, other in pairs)


def forward(stages: list[rpc.RRef[Stage]], images: Tensor) -> Tensor:
    x = rpc.RRef(images)
    for stage in stages:
        x = stage.remote().forward(x)  # the stage fetches x from the previous one once it exists
    return x.to_here()


def run_pipeline(stages: list[rpc.RRef[Stage]], images: Tensor, labels: Tensor) -> list[list[Span]]:
    neighbors = zip([None, *stages], stages, [*stages[1:], None], strict=False)
    running = [stage.rpc_async().run(before, after) for before, stage, after in neighbors]
    for i, (x, y) in enumerate(zip(images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True)):
        stages[0].rpc_async().put("F", i, x)
        stages[-1].rpc_async().put("B", i, y)
    return torch.futures.wait_all(running)


def master(args: argparse.Namespace) -> bool:
    stages = [rpc.remote(f"stage{i}", Stage, args=(i, args.stages, args.seed)) for i in range(args.stages)]
    digits, apart = load_digits(data="digits"), 0.0
    alone, piped = list[float](), list[float]()
    title = f"Residual network in {args.stages} stages, {MICRO_BATCHES} micro-batches of {BATCH // MICRO_BATCHES}"
    with View(title, args.steps) as view:
        for step in range(1, args.steps + 1):
            chosen = torch.randperm(len(digits.labels))[:BATCH]
            images, labels = digits.images[chosen], digits.labels[chosen]
            with dist_autograd.context() as context_id:
                begin = time.monotonic()
                dist_autograd.backward(context_id, [F.cross_entropy(forward(stages, images), labels)])
                middle = time.monotonic()
                spans = run_pipeline(stages, images, labels)
                end = time.monotonic()
                apart = max(apart, *(stage.rpc_sync().step(context_id) for stage in stages))
            alone.append(1000 * (middle - begin))
            piped.append(1000 * (end - middle))
            for i, each in enumerate(spans):
                busy = sum(until - since for _, since, until in each) / (end - middle)
                view.worker(f"stage {i}", "1F1B", passes=f"{len(each)} a step", busy=f"{busy:.0%}")
            shown = {"without_pipeline": f"{alone[-1]:.0f} ms", "with_1F1B": f"{piped[-1]:.0f} ms"}
            view.row(step=f"{step}", **shown, gradients_apart=f"{apart:.0e}")
    accuracy = digits.accuracy(lambda images: forward(stages, images))
    figure, (left, right) = new_figure(title, panels=2)
    timeline(left, "the last step: F forward, B backward", [(f"stage {i}", each) for i, each in enumerate(spans)])
    curves(right, {"without a pipeline": alone, "1F1B": piped}, "step", "forward and backward passes [ms]")
    view.print(f"Figure: {save(figure, args.out, 'pipeline')}")
    if args.steps >= 3 * COLD:
        slow, fast = median(alone[COLD:]), median(piped[COLD:])
        view.print(
            f"A step takes {slow:.0f} ms without a pipeline, {fast:.0f} ms with it: {slow / fast:.2f} times as fast"
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
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.goal = 3, 0.2
    launch(run_worker, args.stages + 1, args)
