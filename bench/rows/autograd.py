"""Distributed autograd: passes over calls, steps of training, trainers together.

Where the same work can be done in one process, the two alternate, and the local work is the baseline: the
difference is the overhead of the framework.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from bench import heap
from bench.competitors.base import Client
from bench.row import OURS, TORCH, Family, FasterThan, Goal, LessOverhead, Row, Sampler, Samples, WithinBaseline
from bench.training import (
    SERVER,
    Clock,
    ConvNet,
    Framework,
    Server,
    Step,
    as_is,
    chain,
    local_step,
    remote_step,
    train_together,
)

__all__ = ["AUTOGRAD", "TRAINING", "one_pass"]

BATCHES = (1, 8, 32)
NODES = (100, 1000, 10_000, 100_000)
SHARE = 0.1  # largest share of bookkeeping in a backward pass whose nodes work
ONLY = {OURS: "", "parent": "", TORCH: "", "": "has no distributed autograd, or torch's"}

Pair = tuple[Step, Step | None]  # a step, and the same in this process


def paired(prepare: Callable[[Framework], Pair], client: Client, sampler: Sampler) -> Samples:
    """Measure a remote step, and as its baseline the same step in this process.

    `prepare` checks that the gradients are correct.
    """
    step, here = prepare(Framework(client.rpc_parent))
    pairs = sampler.loop(lambda: (seconds(step), None if here is None else seconds(here)))
    return {"": [step for step, _ in pairs], "baseline": [here for _, here in pairs if here is not None]}


def seconds(step: Step) -> float:
    clock = Clock()
    step(clock)
    return clock.seconds


def one_pass(framework: Framework, x: Tensor, forward: Callable[[], Tensor], whole: bool = True) -> Step:
    """Return a forward and a backward pass in a new context.

    Both are timed, or the backward pass alone if `whole` is False.
    """

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
        raise AssertionError("the gradient is wrong")
    return step


def one_call(framework: Framework) -> Pair:
    x, w = torch.rand(32, 32, requires_grad=True), torch.rand(32, 32)
    step = one_pass(framework, x, lambda: framework.rpc.rpc_sync(SERVER, torch.mm, args=(x, w)))
    return checked(step, torch.ones(32, 32) @ w.t()), None


def plain_against_context(framework: Framework) -> Pair:
    """Return a pass without a context; the baseline is the same pass in one."""
    x, w = torch.rand(32, 32, requires_grad=True), torch.rand(32, 32)

    def forward() -> Tensor:
        return cast("Tensor", framework.rpc.rpc_sync(SERVER, torch.mm, args=(x, w)))

    def plain(clock: Clock) -> Tensor:
        x.grad = None
        with clock:
            with framework.autograd.plain():
                loss = forward().sum()
            loss.backward()  # type: ignore[no-untyped-call]
        return cast("Tensor", x.grad)

    return checked(plain, torch.ones(32, 32) @ w.t()), one_pass(framework, x, forward)


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
    """Return a pass over many nodes that do nearly nothing, behind one call."""
    return behind_one_call(framework, torch.rand(4, requires_grad=True), partial(grow, count))


def grow(count: int, x: Tensor) -> Tensor:
    for _ in range(count // 2):
        x = x * 1.0 + 0.0
    return x


def layers() -> tuple[nn.Module, Tensor]:
    """500 nodes that work: Linear and ReLU, a hundred times."""
    pairs = ((nn.Linear(512, 512), nn.ReLU()) for _ in range(100))
    return nn.Sequential(*(layer for pair in pairs for layer in pair)), torch.rand(64, 512)


def transformer() -> tuple[nn.Module, Tensor]:
    """Six encoder layers of width 256 with 8 heads, over 4 sequences of 64 tokens."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.rand(4, 64, 256)


def residual() -> tuple[nn.Module, Tensor]:
    """Return a network as deep as ResNet-18, and its input.

    It has eight residual blocks of two 3x3 convolutions with 64 channels; the input is 4 images of 16x16.
    """
    return nn.Sequential(*(Residual(64) for _ in range(8))), torch.rand(4, 64, 16, 16)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        halves = ((nn.GroupNorm(8, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2))
        self.branch = nn.Sequential(*(layer for half in halves for layer in half))

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.branch(x))


def model_behind_one_call(make: Callable[[], tuple[nn.Module, Tensor]], framework: Framework) -> Pair:
    torch.manual_seed(0)
    model, x = make()
    return behind_one_call(framework, x.requires_grad_(), model)


def behind_one_call(framework: Framework, x: Tensor, graph: Callable[[Tensor], Tensor]) -> Pair:
    """Return the backward pass of a local graph that begins with the result of a call."""
    heap.keep()
    step = one_pass(framework, x, lambda: graph(framework.rpc.rpc_sync(SERVER, as_is, args=(x,))), whole=False)
    leaves = [x, *(graph.parameters() if isinstance(graph, nn.Module) else ())]

    def here(clock: Clock) -> Tensor:
        loss = graph(x).sum()
        with clock:
            gradients = torch.autograd.grad(loss, leaves)
        return gradients[0]

    return checked(step, here(Clock())), here


def trainers(batch: int, client: Client, sampler: Sampler) -> Samples:
    """Measure the seconds per sample of all trainers together.

    A step that failed because of another trainer's step has no samples.
    """
    samples, overtaken = train_together(client, batch, sampler.seconds / 4, sampler.seconds)
    if overtaken and client.rpc_parent == "telegrad":
        raise AssertionError(f"{overtaken} steps failed because another trainer's came between")
    return {"": [sampler.seconds / max(samples, 1)]}


def row(name: str, prepare: Callable[[Framework], Pair], *goals: Goal, **rest: Any) -> Row:
    arguments: dict[str, Any] = {"seconds": 0.5, "repeats": 200, "only": ONLY, "goals": goals} | rest
    return Row(name, partial(paired, prepare), **arguments)


MODELS = {
    "500 nodes that work": layers,
    "6-layer transformer block": transformer,
    "residual net of 16 convolutions": residual,
}

AUTOGRAD = Family(
    "autograd",
    "forward and backward passes over calls; the baseline is the same work in one process",
    (
        row("forward-backward over a call, 32x32", one_call, FasterThan(6)),
        row(
            "forward-backward over a call, 32x32, without a context against in one",
            plain_against_context,
            only={OURS: "", "parent": "", "": "has no passes without a context"},
        ),
        row("forward-backward over 4 workers", four_workers, workers=4),
        *(
            row(f"ConvNet step, batch {batch}", partial(conv_net, batch), LessOverhead(4), repeats=40, quick=batch == 1)
            for batch in BATCHES
        ),
        row("embedding, sparse gradients", embedding, repeats=60),
        *(
            row(
                f"backward, {count:,} nodes that do nothing",
                partial(small_nodes, count),
                repeats=max(4, 40_000 // count),
                least=2,
                seconds=1.0 if count < 100_000 else 3.0,
                fresh=True,
                amount=count,
                of="nodes",
                quick=count <= 1000,
                verdict=False,
            )
            for count in NODES
        ),
        *(
            row(
                f"backward, {name}",
                partial(model_behind_one_call, make),
                WithinBaseline(1 / (1 - SHARE)),
                repeats=10,
                seconds=2.0,
                fresh=True,
                quick=False,
            )
            for name, make in MODELS.items()
        ),
    ),
)

TRAINING = Family(
    "training",
    "trainers with one parameter server, for each sample",
    tuple(
        Row(
            f"ConvNet, {count} trainer{'s' * (count > 1)}, batch {batch}",
            partial(trainers, batch),
            workers=count + 1,
            amount=1,
            of="samples",
            seconds=1.2,
            goals=(FasterThan(1),) if count > 1 else (),
            only=ONLY,
            quick=batch == 1 and count > 1,
        )
        for count in (1, 2)
        for batch in BATCHES
    ),
)
