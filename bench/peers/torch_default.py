"""torch.distributed.rpc by default: shared memory and cross-memory attach."""

from types import ModuleType
from typing import Any

from bench.peers.base import Seat
from bench.peers.torch_api import TIMEOUT, TorchApiPeer
from bench.row import TORCH


class Torch(TorchApiPeer):
    name, about, module = TORCH, "torch.distributed.rpc as it comes", "torch.distributed.rpc"
    # Between namespaces of one host its cross-memory attach would go round the network.
    spans_hosts = False

    def options(self, rpc: ModuleType, seat: Seat) -> Any:
        return rpc.TensorPipeRpcBackendOptions(rpc_timeout=TIMEOUT)
