"""Telegrad and its competitors, in the order of the table."""

import os
from pathlib import Path

from bench.competitors.base import Competitor
from bench.competitors.grpc import Grpc
from bench.competitors.monarch import Monarch
from bench.competitors.ray import Ray
from bench.competitors.telegrad import Parent, Telegrad
from bench.competitors.torch_default import Torch
from bench.competitors.torch_uv import TorchUv

_ALL: tuple[Competitor, ...] = (Telegrad(), Torch(), TorchUv(), Grpc(), Ray(), Monarch())
COMPETITORS: dict[str, Competitor] = {one.name: one for one in _ALL}

PARENT = "TELEGRAD_BENCH_PARENT"  # tells processes that the bench spawns


def add_parent(checkout: str) -> None:
    """Add another checkout of Telegrad as the competitor `parent`.

    Raises:
        FileNotFoundError: Its core is not compiled.
    """
    os.environ[PARENT] = checkout
    COMPETITORS["parent"] = Parent(Path(checkout))


if PARENT in os.environ:
    add_parent(os.environ[PARENT])
