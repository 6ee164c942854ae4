"""torch.distributed.rpc as between hosts: TCP, with several lanes for tensors."""

from types import ModuleType
from typing import Any

from bench.peers.base import Seat
from bench.peers.torch_api import TIMEOUT, TorchApiPeer


class TorchUv(TorchApiPeer):
    name, module = "torch uv", "torch.distributed.rpc"
    about = 'torch.distributed.rpc with _transports=["uv"], its TCP, and _channels=["mpt_uv", "basic"]'

    def options(self, rpc: ModuleType, seat: Seat) -> Any:
        return rpc.TensorPipeRpcBackendOptions(rpc_timeout=TIMEOUT, _transports=["uv"], _channels=["mpt_uv", "basic"])
