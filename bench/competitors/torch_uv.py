"""torch.distributed.rpc as between hosts: TCP, with several lanes for tensors."""

from types import ModuleType
from typing import Any

from bench.competitors.base import Seat
from bench.competitors.torch_api import TIMEOUT, TorchApiCompetitor


class TorchUv(TorchApiCompetitor):
    name, module = "torch uv", "torch.distributed.rpc"
    about = 'torch.distributed.rpc with _transports=["uv"], its TCP, and _channels=["mpt_uv", "basic"]'

    def options(self, rpc: ModuleType, seat: Seat) -> Any:
        return rpc.TensorPipeRpcBackendOptions(rpc_timeout=TIMEOUT, _transports=["uv"], _channels=["mpt_uv", "basic"])
