"""Telegrad and its competitors, in the order of the table."""

from bench.competitors.base import Competitor
from bench.competitors.grpc import Grpc
from bench.competitors.monarch import Monarch
from bench.competitors.ray import Ray
from bench.competitors.telegrad import Telegrad
from bench.competitors.torch_default import Torch
from bench.competitors.torch_uv import TorchUv

_ALL: tuple[Competitor, ...] = (Telegrad(), Torch(), TorchUv(), Grpc(), Ray(), Monarch())
COMPETITORS: dict[str, Competitor] = {one.name: one for one in _ALL}
