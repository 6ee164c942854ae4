"""A parameter server, which holds a ConvNet that other processes train.

    python examples/parameter_server.py                            # all on this machine: the server and two trainers
    python examples/parameter_server.py --world_size=2 --rank=0    # or one process per terminal: the server,
    python examples/parameter_server.py --world_size=2 --rank=1    # then its trainers, on this or other machines

The trainers learn to recognize handwritten digits. A trainer runs the forward pass by a remote call and computes the
loss. Distributed autograd sends the gradients back to the server, where `DistributedOptimizer` updates the one model
that all trainers share, each at its own pace. The server itself only serves calls. Status 1 if less than 97 % of the
held-out digits are recognized at the end.
"""

import argparse
from threading import Lock

import torch
import torch.nn.functional as F
from common.digits import load_digits
from common.launch import arguments, join, launch
from common.view import Score, View, curves, new_figure, save
from torch import Tensor, nn

from telegrad import autograd as dist_autograd
from telegrad import rpc
from telegrad.optim import DistributedOptimizer

BATCH = 32
EVERY = 5  # batches between two log lines of a trainer
the_server: "ParameterServer"  # in the server's process


class Net(nn.Module):
    """ConvNet of PyTorch's MNIST example.

    It maps images, `[n, 1, 28, 28]`, to log-probabilities, `[n, 10]`.
    """

    def __init__(self, num_gpus: int) -> None:
        super().__init__()
        gpus = [torch.device("cuda", i) for i in range(min(num_gpus, torch.cuda.device_count()))]
        self.first, self.second = (gpus[0], gpus[-1]) if gpus else (torch.device("cpu"), torch.device("cpu"))
        self.conv1 = nn.Conv2d(1, 32, 3).to(self.first)
        self.conv2 = nn.Conv2d(32, 64, 3).to(self.first)
        self.fc1 = nn.Linear(9216, 128).to(self.second)
        self.fc2 = nn.Linear(128, 10).to(self.second)

    def forward(self, images: Tensor, training: bool) -> Tensor:
        # Dropout is controlled by an argument, not a mode: one trainer may test while another one trains.
        x = F.relu(self.conv1(images.to(self.first)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.dropout2d(x, 0.25, training).flatten(1).to(self.second)
        x = F.dropout(F.relu(self.fc1(x)), 0.5, training)
        return F.log_softmax(self.fc2(x), dim=1).cpu()


class ParameterServer:
    """State of the worker `parameter_server`. Trainers call it concurrently."""

    def __init__(self, view: View) -> None:
        self.view, self.lock = view, Lock()
        self.model: Net | None = None
        self.losses: dict[str, list[float]] = {}
        self.accuracies: dict[str, list[float]] = {}

    def parameter_rrefs(self, num_gpus: int) -> list[rpc.RRef[Tensor]]:
        """Return references to the parameters of the model.

        The first call creates the model, on `num_gpus` GPUs.
        """
        with self.lock:
            self.model = self.model or Net(num_gpus)
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def forward(self, images: Tensor, training: bool = True) -> Tensor:
        assert self.model is not None, "call parameter_rrefs() first"
        return self.model(images, training)

    def report_loss(self, rank: int, epoch: int, batch: int, loss: float) -> None:
        trainer = f"trainer {rank}"
        with self.lock:
            self.losses.setdefault(trainer, []).append(loss)
        self.view.worker(
            trainer, f"training, epoch {epoch}", batches=f"{len(self.losses[trainer])}", loss=f"{loss:.3f}"
        )
        if batch % EVERY:
            self.view.advance()
        else:
            self.view.row(trainer=f"{rank}", epoch=f"{epoch}", batch=f"{batch}", loss=f"{loss:.3f}")

    def report_accuracy(self, rank: int, accuracy: float) -> None:
        self.accuracies.setdefault(f"trainer {rank}", []).append(accuracy)
        self.view.worker(f"trainer {rank}", "tested", accuracy=f"{accuracy:.1%}")


def get_parameter_server() -> ParameterServer:
    return the_server


def run_parameter_server(args: argparse.Namespace) -> bool:
    global the_server
    digits, trainers = load_digits(28, args.data, args.limit), args.world_size - 1
    steps = sum(args.epochs * -(-len(digits.labels[trainer::trainers]) // BATCH) for trainer in range(trainers))
    title = f"Parameter server: {len(digits.labels):,} digits, {trainers} trainers, {args.epochs} epochs"
    with View(title, steps, "batches") as view:
        the_server = ParameterServer(view)
        rpc.init_rpc("parameter_server", rank=0, world_size=args.world_size)
        rpc.shutdown()  # returns when all trainers have called it too; until then the server answers them
    accuracy = digits.accuracy(lambda images: the_server.forward(images, training=False))
    figure, (left, right) = new_figure(title, panels=2)
    curves(left, the_server.losses, "training batch", "loss [nats]")
    curves(right, the_server.accuracies, "epoch", "accuracy on held-out digits", goal=args.goal)
    view.print(f"Figure: {save(figure, args.out, 'parameter_server')}")
    score = Score(accuracy, args.goal, digits.guess)
    return view.verdict(score.reached, f"{score}, on held-out digits")


def run_worker(rank: int, args: argparse.Namespace) -> bool:
    if rank == 0:
        return run_parameter_server(args)
    rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=args.world_size)
    server = rpc.remote("parameter_server", get_parameter_server).rpc_sync()
    parameters = server.parameter_rrefs(args.num_gpus)
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.001)
    digits, share = load_digits(28, args.data, args.limit), slice(rank - 1, None, args.world_size - 1)
    images, labels = digits.images[share], digits.labels[share]
    for epoch in range(1, args.epochs + 1):
        if epoch == args.epochs - 2:
            optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.0002)  # smaller steps at the end
        for batch, chosen in enumerate(torch.randperm(len(labels)).split(BATCH)):
            with dist_autograd.context() as context_id:
                loss = F.nll_loss(server.forward(images[chosen]), labels[chosen])
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            server.report_loss(rank, epoch, batch, loss.item())
            if args.rank is not None and batch % EVERY == 0:
                print(f"Rank {rank} epoch {epoch} batch {batch} loss {loss.item():.3f}", flush=True)
        server.report_accuracy(rank, digits.accuracy(lambda images: server.forward(images, training=False)))
    rpc.shutdown()
    return True


if __name__ == "__main__":
    parser = arguments(__doc__, goal=0.97, limit=None)
    parser.add_argument("--world_size", type=int, default=3, help="the server and its trainers together (3)")
    parser.add_argument("--rank", type=int, help="run this process only: 0 the server, others trainers (default: all)")
    parser.add_argument("--num_gpus", type=int, default=0, help="GPUs to use at the server, 0 to 2 (0)")
    parser.add_argument("--master_addr", default="localhost", help="with --rank: host of rank 0 (localhost)")
    parser.add_argument("--master_port", default="29500", help="with --rank: a port of that host (29500)")
    parser.add_argument("--data", choices=("digits", "mnist"), help="(mnist if torchvision is installed, or digits)")
    parser.add_argument("--epochs", type=int, default=10, help="(10)")
    args = parser.parse_args()
    if args.smoke:
        args.data, args.epochs, args.goal, args.limit = "digits", 1, 0.2, 320
    if args.rank is None:
        launch(run_worker, args.world_size, args)
    else:
        join(run_worker, args)
