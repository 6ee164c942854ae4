"""A parameter server that answers many trainers with one averaged update.

    python examples/batched_parameter_server.py --trainers 4

A trainer computes gradients on its own share of the data and calls `update`, which runs under `async_execution`: it
returns a future, so no thread of the server waits. The last call averages all gradients, makes one step and replies to
all trainers with the new parameters. That is a large batch, spread over processes; one process computes the same for
comparison. Status 1 if the two end with different parameters, or recognize less than 95 % of the held-out digits.
"""

import argparse
from threading import Lock

import torch
import torch.nn.functional as F
from common.digits import Digits, load_digits
from common.launch import arguments, launch
from common.networks import residual_network
from common.view import Score, View, curves, new_figure, save
from torch import Tensor, nn
from torch.futures import Future

from telegrad import rpc

BATCH, EVERY = 16, 10  # of one trainer; updates between two tests
Gradients = tuple[Tensor, ...]  # one per parameter
the_server: "Server"  # in the server's process


def make_model(seed: int) -> nn.Module:
    return nn.Sequential(*residual_network(seed, channels=16, blocks=1))


class Share:
    """Part of the digits from which one trainer learns."""

    def __init__(self, digits: Digits, trainer: int, trainers: int) -> None:
        self.images, self.labels = digits.images[trainer::trainers], digits.labels[trainer::trainers]
        self.chance = torch.Generator().manual_seed(trainer)

    def gradients(self, model: nn.Module) -> tuple[Gradients, float]:
        """Return the gradient of each parameter on a random batch, and the loss."""
        chosen = torch.randint(len(self.labels), (BATCH,), generator=self.chance)
        loss = F.cross_entropy(model(self.images[chosen]), self.labels[chosen])
        return torch.autograd.grad(loss, list(model.parameters())), loss.item()


class Learner:
    """Model that learns from the gradients of several trainers."""

    def __init__(self, seed: int) -> None:
        self.model = make_model(seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)
        self.losses: list[float] = []

    def learn(self, handed_in: list[tuple[Gradients, float]]) -> None:
        """Make one step with the mean of the gradients, and record the mean loss."""
        all_gradients, losses = zip(*handed_in, strict=True)
        for parameter, *gradients in zip(self.model.parameters(), *all_gradients, strict=True):
            parameter.grad = torch.stack(gradients).mean(dim=0)
        self.optimizer.step()
        self.losses.append(sum(losses) / len(losses))


class Server(Learner):
    """State of the worker `server`. The trainers call its methods concurrently."""

    def __init__(self, args: argparse.Namespace, view: View) -> None:
        super().__init__(args.seed)
        self.view, self.digits, self.lock = view, load_digits(data="digits"), Lock()
        self.shares = [Share(self.digits, trainer, args.trainers) for trainer in range(args.trainers)]
        self.round: dict[int, tuple[Gradients, float]] = {}
        self.updated: Future[list[Tensor]] = Future()
        self.accuracies: list[float] = []

    def share(self, trainer: int) -> Share:
        return self.shares[trainer]

    @rpc.functions.async_execution
    def update(self, trainer: int, gradients: Gradients, loss: float) -> Future[list[Tensor]]:
        """Hand in gradients; return the future of the parameters after all have done so."""
        self.view.worker(f"trainer {trainer}", "waits for the others", loss=f"{loss:.3f}")
        with self.lock:
            self.round[trainer] = gradients, loss
            answer = self.updated
            if len(self.round) < len(self.shares):
                return answer
            complete, self.round, self.updated = self.round, {}, Future()
        # No trainer calls again before the reply. The fixed order makes sums, and so runs, repeatable.
        self.learn([complete[trainer] for trainer in range(len(self.shares))])
        self.show()
        for each, (_, its_loss) in complete.items():
            self.view.worker(f"trainer {each}", "computes gradients", loss=f"{its_loss:.3f}")
        answer.set_result([parameter.detach() for parameter in self.model.parameters()])
        return answer

    def show(self) -> None:
        if len(self.losses) % EVERY:
            self.view.advance()
        else:
            self.accuracies.append(self.digits.accuracy(self.model))
            accuracy = f"{self.accuracies[-1]:.1%}"
            self.view.row(update=f"{len(self.losses)}", loss=f"{self.losses[-1]:.3f}", accuracy=accuracy)


def get_server() -> Server:
    return the_server


def run_server(args: argparse.Namespace) -> bool:
    global the_server
    title = f"Batched parameter server: {args.trainers} trainers, {args.updates} averaged updates"
    with View(title, args.updates, "updates") as view:
        the_server = Server(args, view)
        rpc.init_rpc("server", rank=0, world_size=args.trainers + 1)
        rpc.shutdown()  # returns when all trainers have called it too; until then the server answers them

    alone = Learner(args.seed)
    for _ in range(args.updates):
        alone.learn([share.gradients(alone.model) for share in the_server.shares])  # the trainers have copies
    figure, (left, right) = new_figure(title, panels=2)
    curves(left, {"trainers": the_server.losses}, "update", "mean loss [nats]", expected=alone.losses)
    curves(right, {"trainers": the_server.accuracies}, "update", "accuracy", every=EVERY, goal=args.goal)
    view.print(f"Figure: {save(figure, args.out, 'batched_parameter_server')}")
    mine, other = (nn.utils.parameters_to_vector(learner.model.parameters()) for learner in (the_server, alone))
    apart, accuracy = (mine - other).abs().max().item(), the_server.digits.accuracy(the_server.model)
    score = Score(accuracy, args.goal, the_server.digits.guess)
    return view.verdict(score.reached and apart < 1e-4, f"{score}; parameters {apart:.1e} from those of one process")


def run_worker(rank: int, args: argparse.Namespace) -> bool:
    if rank == 0:
        return run_server(args)
    rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=args.trainers + 1)
    server = rpc.remote("server", get_server).rpc_sync()
    model, share = make_model(args.seed), server.share(rank - 1)
    for _ in range(args.updates):
        new = server.update(rank - 1, *share.gradients(model))
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(new), model.parameters())
    rpc.shutdown()
    return True


if __name__ == "__main__":
    parser = arguments(__doc__, goal=0.95)
    parser.add_argument("--trainers", type=int, default=4, help="(4)")
    parser.add_argument("--updates", type=int, default=300, help="(300)")
    args = parser.parse_args()
    if args.smoke:
        args.trainers, args.updates, args.goal = 2, 20, 0.2
    launch(run_worker, args.trainers + 1, args)
