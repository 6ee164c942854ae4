"""Data parallelism and remote modules: from which library is this documentation?

    python examples/ddp_and_rpc.py

Four processes. A parameter server holds a large sparse embedding, a `RemoteModule`. Two trainers hold copies of a small
dense network, in `DistributedDataParallel`. A master creates the embedding, passes it to the trainers and drives them.
One distributed backward pass does both: DDP averages the dense gradients among the trainers, and the sparse gradients
of the embedding go to the server. Documentation is a bag of hashed words; whole files are held out. Status 1 if the
trainers' copies differ in one bit at the end, or less than 60 % of the held-out texts are classified correctly.
"""

import argparse
import random
from collections import Counter
from itertools import accumulate, product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common.launch import arguments, launch
from common.text import LIBRARIES, Document, docstrings
from common.view import Score, View, curves, new_figure, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from telegrad import autograd as dist_autograd
from telegrad import rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

TRAINERS = 2
BUCKETS, SIZE = 1 << 15, 32  # of the embedding
BATCH = 64  # of one trainer


class HybridModel(nn.Module):
    """Model from bags of words to scores of libraries: remote sparse, local dense."""

    def __init__(self, embedding: RemoteModule) -> None:
        super().__init__()
        self.embedding = embedding
        layers = nn.Linear(SIZE, 64), nn.ReLU(), nn.Linear(64, len(LIBRARIES))
        self.dense = DistributedDataParallel(nn.Sequential(*layers))

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.dense(self.embedding.forward(words, offsets))


class Trainer:
    """State of the workers `trainer0` and `trainer1`; the master calls it."""

    def __init__(self, embedding: RemoteModule, training: list[Document], held_out: list[Document]) -> None:
        self.model, self.training, self.held_out = HybridModel(embedding), training, held_out
        # Parameters are passed as references, on whichever worker they are.
        parameters = embedding.remote_parameters() + [rpc.RRef(each) for each in self.model.dense.parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.Adagrad, parameters, lr=0.05)

    def train(self) -> float:
        """Train one epoch and return the mean loss.

        All trainers must do so at the same time, because DDP averages their gradients.
        """
        losses = []
        for chosen in torch.randperm(len(self.training)).split(BATCH):
            words, offsets, libraries = bags([self.training[i] for i in chosen.tolist()])
            with dist_autograd.context() as context_id:
                loss = F.cross_entropy(self.model(words, offsets), libraries)
                dist_autograd.backward(context_id, [loss])
                self.optimizer.step(context_id)
            losses.append(loss.item())
        return sum(losses) / len(losses)

    @torch.no_grad()
    def confusion(self) -> Tensor:
        """Return counts of held-out texts, `[true library, guessed library]`."""
        words, offsets, libraries = bags(self.held_out)
        guesses = self.model.dense.module(self.model.embedding.forward(words, offsets)).argmax(dim=1)
        pairs = Counter(zip(libraries.tolist(), guesses.tolist(), strict=True))
        return torch.tensor([[pairs[i, j] for j in range(len(LIBRARIES))] for i in range(len(LIBRARIES))])

    def dense_parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.dense.parameters()]


def bags(documents: list[Document]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the words in one row, the start of each document, and the libraries."""
    words, libraries = zip(*documents, strict=True)
    begins = accumulate((len(each) for each in words[:-1]), initial=0)
    return torch.tensor([word for each in words for word in each]), torch.tensor(list(begins)), torch.tensor(libraries)


def master(args: argparse.Namespace) -> bool:
    training, held_out = docstrings(BUCKETS, args.files)
    random.Random(args.seed).shuffle(training)
    title = f"DDP and RPC: {len(training):,} docstrings of {len(LIBRARIES)} libraries, {TRAINERS} trainers"
    embedding = RemoteModule("ps/cpu", nn.EmbeddingBag, (BUCKETS, SIZE), {"mode": "mean", "sparse": True})
    share = len(training) // TRAINERS  # the same for all: DDP waits for a batch of every trainer
    shares = [training[i * share : (i + 1) * share] for i in range(TRAINERS)]
    trainers = [rpc.remote(f"trainer{i}", Trainer, args=(embedding, shares[i], held_out)) for i in range(TRAINERS)]
    losses, accuracies = [], []
    with View(title, args.epochs, "epochs") as view:
        for epoch in range(1, args.epochs + 1):
            for i in range(TRAINERS):
                view.worker(f"trainer {i}", f"training, epoch {epoch}", docstrings=f"{share:,}")
            epochs = [trainer.rpc_async().train() for trainer in trainers]
            trained = [each.wait() for each in epochs]
            for i, loss in enumerate(trained):
                view.worker(f"trainer {i}", "tests" if i == 0 else "waits", docstrings=f"{share:,}", loss=f"{loss:.3f}")
            losses.append(sum(trained) / TRAINERS)
            confusion = trainers[0].rpc_sync().confusion()
            accuracies.append((confusion.trace() / confusion.sum()).item())
            view.row(epoch=f"{epoch}", loss=f"{losses[-1]:.3f}", accuracy=f"{accuracies[-1]:.1%}")
    figure, (left, middle, right) = new_figure(title, panels=3, columns=3)
    curves(left, {"mean of the trainers": losses}, "epoch", "loss [nats]")
    curves(middle, {"trainer 0": accuracies}, "epoch", "accuracy on held-out files", goal=args.goal)
    right.imshow(
        confusion / confusion.sum(dim=1, keepdim=True), cmap="Blues", vmin=0, vmax=1.5
    )  # no field too dark for its number
    right.set_xticks(range(len(LIBRARIES)), LIBRARIES, rotation=45, ha="right")
    right.set_yticks(range(len(LIBRARIES)), LIBRARIES)
    right.set(xlabel="guess", ylabel="truth")
    right.grid(visible=False)
    for (row, column), count in zip(
        product(range(len(LIBRARIES)), repeat=2), confusion.flatten().tolist(), strict=True
    ):
        right.text(column, row, f"{count}", ha="center", va="center")
    view.print(f"Figure: {save(figure, args.out, 'ddp_and_rpc')}")
    copies = [trainer.rpc_sync().dense_parameters() for trainer in trainers]
    same = all(torch.equal(*pair) for pair in zip(*copies, strict=True))
    score = Score(accuracies[-1], args.goal, (confusion.sum(dim=1).max() / confusion.sum()).item())
    return view.verdict(same and score.reached, f"{score}; replicas {'equal' if same else 'NOT equal'} bit for bit")


def run_worker(rank: int, args: argparse.Namespace) -> bool:
    name = f"trainer{rank}" if rank < TRAINERS else ("master", "ps")[rank - TRAINERS]
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns unless this is set
    if rank < TRAINERS:
        dist.init_process_group("gloo", rank=rank, world_size=TRAINERS)  # for DDP, at the same MASTER_PORT
    rpc.init_rpc(name, rank=rank, world_size=TRAINERS + 2)
    reached = master(args) if name == "master" else True
    rpc.shutdown()
    if rank < TRAINERS:
        dist.destroy_process_group()
    return reached


if __name__ == "__main__":
    parser = arguments(__doc__, goal=0.6, files=150)
    parser.add_argument("--epochs", type=int, default=6, help="(6)")
    args = parser.parse_args()
    if args.smoke:
        args.epochs, args.goal, args.files = 4, 0.25, 30
    launch(run_worker, TRAINERS + 2, args)
