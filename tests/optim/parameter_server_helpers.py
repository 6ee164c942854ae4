"""A model on a server that several trainers train, and checks of their gradients."""

import itertools
import threading
from typing import Any

import torch
from torch import Tensor, nn, optim

from telegrad import autograd
from telegrad.rpc import RRef

BATCH = 4
WORDS = 12


class Model(nn.Module):
    """Parameters of every kind.

    They are those of a convolution, an embedding (sparse and dense gradients), linear layers, a recurrent cell, and
    bare ones, which operations save as is. Used in two calls, `front` and `back`; `gain` in both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.words = nn.Embedding(WORDS, 4, sparse=True)
        self.more_words = nn.Embedding(WORDS, 4)
        self.mix = nn.Linear(3 * 16 + 8, 6)
        self.cell = nn.GRUCell(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.gain = nn.Parameter(torch.full((6,), 0.5))
        self.weight = nn.Parameter(torch.eye(6))
        self.out = nn.Linear(6, 2)

    def front(self, image: Tensor, ids: Tensor) -> Tensor:
        seen = torch.relu(self.conv(image)).flatten(1)
        read = torch.cat([self.words(ids), self.more_words(ids)], 1)
        hidden: Tensor = self.scale * self.mix(torch.cat([seen, read], 1)) * self.gain
        return hidden

    def back(self, hidden: Tensor) -> Tensor:
        state = self.cell(hidden) @ self.weight
        result: Tensor = self.out(torch.tanh(state * self.gain * self.gain.detach()) @ self.weight.t())
        return result

    def forward(self, part: str, *inputs: Tensor) -> Tensor:
        result: Tensor = getattr(self, part)(*inputs)
        return result


class Descent(optim.Optimizer):
    """Plain gradient descent, in a class that is not torch's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class Server:
    """The model, with the values that the examined forward passes have read."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self._seen: dict[int, tuple[dict[str, Tensor], str, tuple[Tensor, ...]]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def run(self, part: str, examined: bool, *inputs: Tensor) -> tuple[Tensor, int]:
        """A part of the model; and a number for what it has seen, if that is to be kept."""
        number = 0
        if examined:
            values = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
            with self._lock:
                number = next(self._numbers)
                self._seen[number] = values, part, tuple(x.detach().clone() for x in inputs)
        return self.model(part, *inputs), number

    def examine(self, context_id: int, front: int, back: int, of_output: Tensor) -> list[str]:
        """Return the names of parameters with unexpected gradients."""
        expected: dict[str, Tensor] = {}
        gradient = of_output
        for number in (back, front):
            with self._lock:
                values, part, inputs = self._seen.pop(number)
            again = Model()  # not functional_call, which changes the module that others use
            leaves = dict(again.named_parameters())
            for name, leaf in leaves.items():
                leaf.data = values[name]
            first = inputs[0].requires_grad_(inputs[0].is_floating_point() and part == "back")
            output = again(part, first, *inputs[1:])
            wanted = [*leaves.values(), *([first] if first.requires_grad else [])]
            found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
            for name, one in zip(leaves, found, strict=False):
                if one is not None:
                    one = one.to_dense()
                    expected[name] = expected[name] + one if name in expected else one
            gradient = found[-1] if first.requires_grad else gradient
        gradients = autograd.get_gradients(context_id)
        wrong = []
        for name, parameter in self.model.named_parameters():
            got = gradients.get(parameter)
            if got is None or not torch.allclose(got.to_dense(), expected[name], rtol=1e-4, atol=1e-6):
                wrong.append(name)
        return wrong

    def parameters(self, sparse: bool) -> list[RRef[nn.Parameter]]:
        """Return references to the parameters with sparse gradients, or to the others."""
        return [RRef(p) for name, p in self.model.named_parameters() if (name == "words.weight") == sparse]


def serve() -> Server:
    return Server()


def train(server: RRef[Server], optimizers: list[Any], seed: int, steps: int) -> int:
    """Train, and return the number of examined gradients.

    Raises:
        AssertionError: one was wrong.
    """
    generator = torch.Generator().manual_seed(seed)
    examined = 0
    for number in range(steps):
        examining = number % 5 == 0
        image = torch.randn(BATCH, 1, 4, 4, generator=generator)
        ids = torch.randint(WORDS, (BATCH,), generator=generator)
        weights = torch.randn(BATCH, 2, generator=generator) / BATCH
        call = server.rpc_sync()
        with autograd.context() as context_id:
            hidden, front = call.run("front", examining, image, ids)
            output, back = call.run("back", examining, hidden)
            autograd.backward(context_id, [(output * weights).sum()])
            if examining:
                wrong = call.examine(context_id, front, back, weights)
                assert not wrong, f"trainer {seed}, step {number}: gradients of {wrong} are of other values"
                examined += 1
            for optimizer in optimizers:
                optimizer.step(context_id)
    return examined
