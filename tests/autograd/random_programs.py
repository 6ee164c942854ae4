"""Random programs, run on simulated workers and in one process.

The gradients of both runs are compared. Values are small integers in float64, so that sums are exact in any order and
gradients must agree bit for bit. Nonlinear gradient hooks (remainders) keep them small, and reveal any hook that gets
a part of a gradient.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from simulated_group import Group
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Transfer = Callable[[int, int, Sequence[Tensor]], list[Tensor]]


class Shift(torch.autograd.Function):
    """Python function of two tensors without a gradient for the second."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * 2 + b.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, None


class Pair(torch.autograd.Function):
    """Python function with two outputs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return a + b, a - b

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        return g + h, g - h


class RunResult(NamedTuple):
    gradients: dict[str, Tensor | None]
    hooks: Counter[str]


class Program:
    """Program determined by `seed`.

    `undefined`: with operations with possibly undefined gradients. `floats`: leaves that are no integers.
    """

    def __init__(self, seed: int, size: int | None = None, floats: bool = False) -> None:
        self.floats = floats
        rng = random.Random(f"program {seed}")
        self.seed = seed
        self.workers = rng.randint(1, 4)
        self.steps = size or rng.choice((6, 12, 25, 50))
        self.twice = rng.random() < 0.25
        self.undefined = rng.random() < 0.2
        self.hooks = rng.random() < 0.6 and not self.undefined
        self.special = rng.random() < 0.4  # complex and sparse, modules, checkpoints

    def run(self, transfer: Transfer) -> tuple[int, list[Tensor], dict[str, Tensor], Counter[str]]:
        """Run forward; return (root worker, roots, leaves by name, hooks that fired)."""
        rng = random.Random(f"steps {self.seed}")
        fired: Counter[str] = Counter()
        leaves: dict[str, Tensor] = {}
        values: list[list[Tensor]] = [[] for _ in range(self.workers)]

        def fresh(worker: int) -> Tensor:
            name = f"leaf {len(leaves)} of {worker}"
            gen = torch.Generator().manual_seed(rng.randrange(1 << 30))
            leaf = torch.randint(-3, 4, (2, 3), generator=gen).double()
            if self.floats:
                leaf += torch.rand((2, 3), generator=gen)
            leaf.requires_grad_()
            leaves[name] = leaf
            if self.hooks and rng.random() < 0.3:
                hook(leaf, name)
            return leaf

        def hook(tensor: Tensor, name: str) -> None:
            def see(grad: Tensor | None) -> Tensor | None:
                if grad is None:  # torch calls hooks so where other outputs of the node have a gradient
                    return None
                fired[name] += 1
                return torch.remainder(grad, 61) - 30

            if not tensor.is_complex():
                tensor.register_hook(see)

        for worker in range(self.workers):
            values[worker] = [fresh(worker) for _ in range(rng.randint(1, 3))]
        for step in range(self.steps):
            worker = rng.randrange(self.workers)
            here = values[worker]
            picked = [rng.choice(here) for _ in range(3)]
            if rng.random() < 0.4:
                dst = rng.randrange(self.workers)
                count = rng.choice((1, 1, 2, 3))
                message = [rng.choice(here) for _ in range(count)]
                if rng.random() < 0.2:
                    message.append(message[0])
                if rng.random() < 0.2:
                    message.append(torch.ones(2, 3).double())
                new = transfer(worker, dst, message)
                if rng.random() < 0.3 and new[0].requires_grad:
                    new[0].mul_(2)  # in place on a received value
                if rng.random() < 0.2 and new[0].requires_grad:
                    new.append(new[0].view(3, 2).view(2, 3))
                values[dst] += new
            else:
                dst = worker
                new = self.operation(rng, picked, partial(fresh, worker))
                values[worker] += new
            if self.hooks:
                for number, value in enumerate(new):
                    if value.requires_grad and not value.is_leaf:
                        if rng.random() < 0.2:
                            hook(value, f"step {step}.{number}")
                        if rng.random() < 0.05:
                            value.retain_grad()
            if self.special and rng.random() < 0.3:
                values[worker] += self.special_operation(rng, rng.choice(here), fired, step, partial(fresh, worker))
        root = rng.randrange(self.workers)
        wanted = [v for v in values[root] if v.requires_grad]
        roots = [v.sum() for v in rng.sample(wanted, min(len(wanted), rng.randint(1, 4)))] if wanted else []
        return root, roots, leaves, fired

    def operation(self, rng: random.Random, picked: list[Tensor], fresh: Callable[[], Tensor]) -> list[Tensor]:
        a, b, c = picked
        kind = rng.randrange(16)
        if kind == 0:
            return [fresh()]
        if kind == 1:
            return [torch.remainder(a * b, 7)]
        if kind == 2:
            return [a + b]
        if kind == 3:
            return [a - b * 2]
        if kind == 4:
            return [torch.remainder(a @ b.t() @ c, 5)]
        if kind == 5:
            return [a.relu() + c]
        if kind == 6:
            return [torch.cat([a[:1], b[1:]])]
        if kind == 7:
            return [(a * 3).chunk(2, 0)[0].expand(2, 3) + b]
        if kind == 8:
            return [Shift.apply(a, b) if self.undefined else a * 2 + b.detach()]
        if kind == 9:
            return list(Pair.apply(a, b))
        if kind == 10:
            return [a.clone().add_(b).mul_(2)]
        if kind == 11:
            return [a + b.sum(0, keepdim=True)]  # broadcasts
        if kind == 12:
            return [torch.where(a > b, a, c)]
        if kind == 13:
            return [a.t().reshape(2, 3)]
        if kind == 14:
            x = a.clone()
            x[0] = b[1]
            return [x]
        return [a.detach() + b, a]

    def special_operation(
        self, rng: random.Random, a: Tensor, fired: Counter[str], step: int, fresh: Callable[[], Tensor]
    ) -> list[Tensor]:
        kind = rng.randrange(5)
        if kind == 0:
            weight = fresh()
            return [checkpoint(lambda x: torch.remainder(x * weight, 5) * weight, a, use_reentrant=False)]
        if kind == 1:
            module = torch.nn.Linear(3, 3, bias=False).double()
            with torch.no_grad():
                module.weight.copy_(torch.randint(-2, 3, (3, 3), generator=torch.Generator().manual_seed(step)))
            module.weight.requires_grad_(False)

            def see(module: Any, inputs: Any, outputs: Any) -> None:
                fired[f"module {step}"] += 1

            module.register_full_backward_hook(see)
            return [module(a)]
        if kind == 2:
            z = torch.complex(a, a * 2)
            return [torch.view_as_real(z * z.conj().resolve_conj()).sum(-1)]
        if kind == 3:
            table = fresh()
            rows = torch.nn.functional.embedding(torch.tensor([0, 1, 1]), table, sparse=not table._backward_hooks)
            return [rows[:2] + (table * 2 if rng.random() < 0.5 else 0)]
        return [(a * 2).to(torch.float32).double()]


def local(program: Program) -> RunResult:
    """Run the program in one process: a message is a copy."""
    _, roots, leaves, fired = program.run(lambda src, dst, tensors: [t.clone() for t in tensors])
    if roots:
        for _ in range(1 + program.twice):
            torch.autograd.backward(roots, retain_graph=program.twice)
    return RunResult({name: leaf.grad for name, leaf in leaves.items()}, fired)


def distributed(program: Program, network: int) -> tuple[RunResult, Group]:
    group = Group(program.workers, network)
    root, roots, leaves, fired = program.run(group.transfer)
    names = {id(leaf): name for name, leaf in leaves.items()}
    if roots:
        for time in range(1 + program.twice):
            group.backward(root, roots, retain_graph=program.twice and not time)
    assert all(leaf.grad is None for leaf in leaves.values()), ".grad was touched"
    gradients: dict[str, Tensor | None] = dict.fromkeys(leaves)
    for worker, context in enumerate(group.contexts):
        for leaf, grad in context.gradients.items():
            name = names[id(leaf)]
            assert name.endswith(f" of {worker}"), f"{name} got a gradient at worker {worker}"
            gradients[name] = grad
    return RunResult(gradients, fired), group


def compare(program: Program, expected: RunResult, found: RunResult) -> None:
    where = f"seed {program.seed}"
    for name, grad in expected.gradients.items():
        other = found.gradients[name]
        if grad is None or other is None:
            left = grad if grad is not None else other
            # If a gradient is undefined locally, a Python function replaces it by zeros, which are defined.
            assert left is None or (program.undefined and not left.to_dense().any()), (
                f"{where}: {name} is {grad}, and {other} when distributed"
            )
            continue
        assert grad.layout == other.layout, f"{where}: {name} has layout {grad.layout}, and {other.layout}"
        a, b = grad.to_dense(), other.to_dense()
        assert torch.equal(a, b), f"{where}: {name} is\n{a}\nand when distributed\n{b}"
    assert expected.hooks == found.hooks, (
        f"{where}: hooks {expected.hooks - found.hooks}, {found.hooks - expected.hooks}"
    )
