"""Language model over two processes: a parameter server and a trainer.

    python examples/language_model.py

Embedding and decoder reside on the server, the LSTM on the trainer. The model of PyTorch's RPC tutorial learns to
predict the next word of Python's own help texts. Each step calls the server twice; distributed autograd sends gradients
back through both calls, and `DistributedOptimizer` updates all parameters. For comparison the same model is trained in
one process. Status 1 if the perplexities differ, or are no better on held-out text than word frequencies.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common.launch import arguments, launch
from common.text import guess, help_texts
from common.view import View, curves, new_figure, save
from torch import Tensor, nn

from telegrad import autograd as dist_autograd
from telegrad import rpc
from telegrad.optim import DistributedOptimizer

BATCH, LENGTH = 20, 32  # sequences side by side, words of each in a step
VOCABULARY = 2000  # words; 0 stands for all rarer ones
SIZE = 128  # of the embedding, and of the LSTM's state
EMBEDDING = nn.Embedding, VOCABULARY, SIZE
LSTM = nn.LSTM, SIZE, SIZE
DECODER = nn.Linear, SIZE, VOCABULARY
LEARNING_RATE = 0.003
Hidden = tuple[Tensor, Tensor]


def make(seed: int, kind: Callable[..., nn.Module], *sizes: int) -> nn.Module:
    """Return a layer with weights that depend only on the seed."""
    torch.manual_seed(seed)
    return kind(*sizes)


class RNNModel(nn.Module):
    """Model from words, `[time, batch]`, to scores of the next word.

    The scores have the shape `[time, batch, vocabulary]`. `embed` and `decode` may be modules or calls of remote
    modules: the forward pass is written once.
    """

    def __init__(self, embed: Callable[[Tensor], Tensor], decode: Callable[[Tensor], Tensor], seed: int) -> None:
        super().__init__()
        self.embed, self.rnn, self.decode = embed, make(seed, *LSTM), decode

    def forward(self, words: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        output, hidden = self.rnn(self.embed(words), hidden)
        return self.decode(output), hidden

    def loss(self, words: Tensor, following: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        scores, (h, c) = self(words, hidden)
        return F.cross_entropy(scores.flatten(0, 1), following.flatten()), (h.detach(), c.detach())


def parameter_rrefs(module: rpc.RRef[nn.Module]) -> list[rpc.RRef[Tensor]]:
    """Return references to the parameters, on the worker of the module."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def split_model(seed: int) -> tuple[RNNModel, DistributedOptimizer]:
    """Create the model over two workers."""
    calls, parameters = [], []
    for kind in (EMBEDDING, DECODER):  # one after the other: both use the server's random generator
        part = rpc.remote("ps", make, args=(seed, *kind))
        parameters += rpc.rpc_sync("ps", parameter_rrefs, args=(part,))
        calls.append(part.rpc_sync().forward)
    model = RNNModel(calls[0], calls[1], seed)
    parameters += [rpc.RRef(parameter) for parameter in model.parameters()]  # of the local LSTM
    return model, DistributedOptimizer(torch.optim.Adam, parameters, lr=LEARNING_RATE)


def split_step(model: RNNModel, optimizer: DistributedOptimizer, *batch: Any) -> tuple[Tensor, Hidden]:
    with dist_autograd.context() as context_id:
        loss, hidden = model.loss(*batch)
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss, hidden


def whole_model(seed: int) -> tuple[RNNModel, torch.optim.Optimizer]:
    """Create the same model in one process."""
    model = RNNModel(make(seed, *EMBEDDING), make(seed, *DECODER), seed)
    return model, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)


def whole_step(model: RNNModel, optimizer: torch.optim.Optimizer, *batch: Any) -> tuple[Tensor, Hidden]:
    optimizer.zero_grad()
    loss, hidden = model.loss(*batch)
    loss.backward()
    optimizer.step()
    return loss, hidden


def perplexity(text: Tensor, step: Callable[..., tuple[Tensor, Hidden]], *to: Any, done: Callable[[], None]) -> float:
    """Return e to the mean loss per word of `text`, `[time, BATCH]`.

    Calls `step(*to, *batch)` and `done()` on one part of the text after the other.
    """
    hidden = (torch.zeros(1, BATCH, SIZE), torch.zeros(1, BATCH, SIZE))
    total = 0.0
    for words, following in zip(text[:-1].split(LENGTH), text[1:].split(LENGTH), strict=True):
        loss, hidden = step(*to, words, following, hidden)
        total += loss.item() * len(words)
        done()
    return math.exp(total / (len(text) - 1))


def train(args: argparse.Namespace) -> bool:
    training, held_out = help_texts(VOCABULARY, BATCH, args.limit)
    models = {"split": (split_step, *split_model(args.seed)), "whole": (whole_step, *whole_model(args.seed))}
    tests: dict[str, list[float]] = {name: [] for name in models}
    title = f"Language model over two workers: {training.numel():,} words of Python's help"
    pieces = sum(math.ceil((len(text) - 1) / LENGTH) for text in (training, held_out))
    with View(title, args.epochs * len(models) * (pieces + 1), "batches") as view:
        for epoch in range(1, args.epochs + 1):
            for name, (step, model, optimizer) in models.items():
                for each in models:
                    view.worker(f"{each} model", f"training, epoch {epoch}" if each == name else "waits for its turn")
                start = time.perf_counter()
                fitted = perplexity(training, step, model, optimizer, done=view.advance)
                speed = training.numel() / (time.perf_counter() - start)
                view.worker(f"{name} model", "tests")
                with torch.no_grad():
                    tests[name].append(perplexity(held_out, model.loss, done=view.advance))
                figures = {"perplexity": f"{fitted:.3f}", "held_out": f"{tests[name][-1]:.3f}"}
                view.row(epoch=f"{epoch}", model=name, **figures, words_per_second=f"{speed:,.0f}")
    split, whole = tests.values()
    figure, (axes,) = new_figure(title)
    curves(axes, {"over two workers": split}, "epoch", "perplexity on held-out text", expected=whole)
    view.print(f"Figure: {save(figure, args.out, 'language_model')}")
    apart = max(abs(mine / other - 1) for mine, other in zip(split, whole, strict=True))
    alone = guess(training, held_out, VOCABULARY)
    claim = f"perplexity {split[-1]:.1f}, words' frequencies alone {alone:.1f}; split and whole {apart:.1e} apart"
    return view.verdict(apart < 1e-3 and split[-1] < alone, claim)


def run_worker(rank: int, args: argparse.Namespace) -> bool:
    rpc.init_rpc("trainer" if rank == 0 else "ps", rank=rank, world_size=2)
    reached = train(args) if rank == 0 else True  # the server only serves calls, which shutdown does
    rpc.shutdown()
    return reached


if __name__ == "__main__":
    parser = arguments(__doc__, limit=None)
    parser.add_argument("--epochs", type=int, default=5, help="(5)")
    args = parser.parse_args()
    if args.smoke:
        args.epochs, args.limit = 2, 16 * LENGTH + 1
    launch(run_worker, 2, args)
