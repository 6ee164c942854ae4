"""torch.distributed.rpc by default: shared memory and cross-memory attach."""

from types import ModuleType
from typing import Any

from bench.competitors.base import Seat
from bench.competitors.torch_api import TIMEOUT, TorchApiCompetitor
from bench.row import TORCH


class Torch(TorchApiCompetitor):
    name, about, module = TORCH, "torch.distributed.rpc with default options", "torch.distributed.rpc"
    # Between namespaces of one host its cross-memory attach would bypass the network.
    spans_hosts = False

    def options(self, rpc: ModuleType, seat: Seat) -> Any:
        return rpc.TensorPipeRpcBackendOptions(rpc_timeout=TIMEOUT)
