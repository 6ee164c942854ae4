"""TorchRL's remote replay buffer: torchrl_buffer.py tests | example [RANK PORT].

`tests` does what TorchRL's tests of it do, in the processes of a pool. `example` does what its example does: a trainer,
a buffer and collectors, each a program of its own, in a group without a fixed size.
"""

import socket
import subprocess
import sys
import tempfile

import torch
import torch.multiprocessing as mp
from tensordict import TensorDict
from torch.distributed import rpc
from torchrl._utils import accept_remote_rref_invocation
from torchrl.data.replay_buffers import RemoteTensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.storages import LazyMemmapStorage
from torchrl.data.replay_buffers.writers import RoundRobinWriter

TIMEOUT = 60.0  # s
COLLECTORS = 2
ITEMS = 20  # of each collector


class Buffer(RemoteTensorDictReplayBuffer):
    """Buffer with public methods that accept a reference instead of the buffer."""

    def __init__(self, capacity):
        self.folder = tempfile.TemporaryDirectory()  # goes with the buffer
        super().__init__(
            storage=LazyMemmapStorage(max_size=capacity, scratch_dir=self.folder.name, device=torch.device("cpu")),
            sampler=RandomSampler(),
            writer=RoundRobinWriter(),
            collate_fn=lambda x: x,
        )


def join(name, rank, port, world_size=None):
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=16, rpc_timeout=TIMEOUT, init_method=f"tcp://127.0.0.1:{port}"
    )
    backend = rpc.BackendType.TENSORPIPE
    rpc.init_rpc(name, backend=backend, rank=rank, world_size=world_size, rpc_backend_options=options)


def item(value):
    return TensorDict({"a": torch.tensor([value])}, [])


def add(buffer, value):
    return rpc.rpc_sync(buffer.owner(), Buffer.add, args=(buffer, item(value)))


def sample(buffer, count):
    return rpc.rpc_sync(buffer.owner(), Buffer.sample, args=(buffer, count))


# ---- the tests


def construct(name):
    if name == "TRAINER":
        assert type(rpc.remote("BUFFER", Buffer, args=(1000,))) is torch._C._distributed_rpc.PyRRef


def add_remotely(name):
    if name == "TRAINER":
        assert add(rpc.remote("BUFFER", Buffer, args=(1000,)), 5) == 0


def sample_remotely(name):
    if name == "TRAINER":
        buffer = rpc.remote("BUFFER", Buffer, args=(1000,))
        add(buffer, 5)
        sampled = sample(buffer, 1)
        assert type(sampled) is TensorDict
        assert sampled["a"].tolist() == [[5]]


def run_tests():
    names = ("BUFFER", "TRAINER")
    for test in (construct, add_remotely, sample_remotely):
        with mp.Pool(len(names)) as pool:
            pool.starmap(
                join, [(name, rank, port, len(names)) for port in [free_port()] for rank, name in enumerate(names)], 1
            )
            pool.map(test, names, 1)
            pool.starmap(rpc.shutdown, [()] * len(names), 1)


# ---- the example


class Collector:
    def __init__(self, buffer):
        self.buffer = buffer

    @accept_remote_rref_invocation
    def collect(self):
        indices = [
            rpc.remote(self.buffer.owner(), Buffer.add, args=(self.buffer, item(value))).to_here()
            for value in range(ITEMS)
        ]
        assert indices == sorted(indices)
        return indices


def train():
    buffer = rpc.remote(wait_for("ReplayBuffer"), Buffer, args=(10000,))
    infos = [wait_for(f"DataCollector{number}") for number in range(COLLECTORS)]
    collectors = [rpc.remote(info, Collector, args=(buffer,)) for info in infos]
    collected = [
        rpc.remote(info, Collector.collect, args=(collector,))
        for info, collector in zip(infos, collectors, strict=True)
    ]
    indices = [index for indices in collected for index in indices.to_here()]
    assert sorted(indices) == list(range(COLLECTORS * ITEMS))
    for _ in range(3):
        assert set(sample(buffer, 16)["a"].flatten().tolist()) <= set(range(ITEMS))
    for name in ["ReplayBuffer", *(info.name for info in infos)]:
        rpc.rpc_sync(name, finish)


def wait_for(name):
    """Wait for a worker to join; return its info."""
    while True:
        try:
            return rpc.get_worker_info(name)
        except RuntimeError:
            assert not finished.wait(0.1)


finished = mp.Event()


def finish():
    finished.set()


def run_node(rank, port):
    name = ("Trainer", "ReplayBuffer", *(f"DataCollector{number}" for number in range(COLLECTORS)))[rank]
    join(name, rank, port)
    if rank == 0:
        train()
    else:
        assert finished.wait(TIMEOUT)
    rpc.shutdown()


def run_example():
    port = free_port()
    words = [sys.executable, __file__, "example"]
    nodes = [subprocess.Popen([*words, str(rank), str(port)]) for rank in range(2 + COLLECTORS)]
    assert [node.wait() for node in nodes] == [0] * len(nodes)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    what, *node = sys.argv[1:]
    if node:
        run_node(*map(int, node))
    else:
        {"tests": run_tests, "example": run_example}[what]()
        print("done on", rpc.__name__, flush=True)
