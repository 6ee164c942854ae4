"""Residual network as a list of layers, so that it can be cut anywhere."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Residual block, `[n, channels, 8, 8]` to the same.

    Its group norms treat each image separately, however batches are cut.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        halves = ((nn.GroupNorm(8, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2))
        self.residual = nn.Sequential(*(layer for half in halves for layer in half))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.residual(x)


def residual_network(seed: int, channels: int = 48, blocks: int = 6) -> list[nn.Module]:
    """Return the layers of a network from digits to class scores.

    It maps `[n, 1, 8, 8]` to `[n, 10]`. The same seed gives the same weights.
    """
    torch.manual_seed(seed)
    head = nn.Sequential(nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(channels * 16, 10))
    return [nn.Conv2d(1, channels, 3, padding=1), *(Block(channels) for _ in range(blocks)), head]
