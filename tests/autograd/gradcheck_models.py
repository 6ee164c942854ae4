"""Parts of models with exact integer arithmetic, and ways to call remote parts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from telegrad.rref import RRef

WIDTH = 3


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Return small integers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, dtype=torch.float64)


class Scale(nn.Module):
    """Elementwise product, which saves the parameter for its gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers(WIDTH, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Mix(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers(WIDTH, WIDTH, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) @ self.weight + 1


class Add(nn.Module):
    """Diamond: all parts get the same activation, and their results are added."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts[0](x)
        for part in self.parts[1:]:
            y = y + part(x)
        return y


class Residual(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


class Surrounding(nn.Module):
    """Cell used before and after another part: tied weights."""

    def __init__(self, cell: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.part(self.cell(x)))


class UnusedResult(nn.Module):
    """Model in which the result of a part is unused."""

    def __init__(self, unused: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.unused = unused
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.part(x)


class InPlace(nn.Module):
    """Module that changes its input and views of it in place."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        y.mul_(2)
        y[0].add_(x[1])
        return y.t().contiguous().t()


class Views(nn.Module):
    """Module that sends a view and uses a part of the result."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, x.flip(0)])
        y = self.part(both[1 : 1 + x.shape[0]])
        return y.transpose(0, 1).transpose(0, 1)[: x.shape[0]]


class Checkpointed(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=False)


# ---- ways to call a part, given its reference; all of them compute what the part computes


def wait(part: RRef[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return part.rpc_sync().forward(*args, **kwargs)


def start(part: RRef[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return part.rpc_async().forward(*args, **kwargs).wait()


def fetch(part: RRef[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return part.remote().forward(*args, **kwargs).to_here()


def fetch_twice(part: RRef[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = part.remote().forward(*args, **kwargs)
    return result.to_here() * 3 - result.to_here() * 2


def call_twice_use_one(part: RRef[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    unused = part.rpc_async().forward(*args, **kwargs)
    result = part.rpc_sync().forward(*args, **kwargs)
    unused.wait()
    return result


CALLS = (wait, start, fetch, fetch_twice, call_twice_use_one)
