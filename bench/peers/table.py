"""Every peer there is, in the order of the table."""

from bench.peers.base import Peer
from bench.peers.grpc import Grpc
from bench.peers.monarch import Monarch
from bench.peers.ray import Ray
from bench.peers.telegrad import Telegrad
from bench.peers.torch_default import Torch
from bench.peers.torch_uv import TorchUv

PEERS: dict[str, Peer] = {peer.name: peer for peer in (Telegrad(), Torch(), TorchUv(), Grpc(), Ray(), Monarch())}
