"""TorchRL's RPCCollector, used as in TorchRL's own tests.

Usage: torchrl_collector.py SCENARIO [ARGUMENT ...].
TorchRL's wheel has the environments of its tests, but not the tests.
"""

import socket
import sys

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import RPCCollector
from torchrl.envs.utils import RandomPolicy
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv, CountingEnv

CLASSES = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
NODES = 2


class CountingPolicy(TensorDictModuleBase):
    """Policy with its weight as action, so the data show the weights of a worker."""

    in_keys = ()
    out_keys = ("action",)

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, tensordict):
        return tensordict.set("action", self.weight.expand(tensordict.shape).clone())


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def collect(policy, env, frames_per_batch, total_frames, after_first=None, nodes=NODES, **options):
    """Return the batches; check that each has the requested number of frames."""
    collector = RPCCollector(
        [env] * nodes,
        policy,
        frames_per_batch=frames_per_batch,
        total_frames=total_frames,
        launcher="mp",
        tcp_port=free_port(),
        **options,
    )
    batches = []
    for batch in collector:
        assert batch.numel() == frames_per_batch, batch
        batches.append(batch)
        if len(batches) == 1 and after_first is not None:
            after_first(collector)
    collector.shutdown()
    assert sum(batch.numel() for batch in batches) == -(-total_frames // frames_per_batch) * frames_per_batch
    return batches


def random_policy():
    return RandomPolicy(ContinuousActionVecMockEnv().action_spec)


def basic(frames_per_batch):
    batches = collect(random_policy(), ContinuousActionVecMockEnv, int(frames_per_batch), 1000)
    assert batches[-1].names[-1] == "time"


def synchronous(value):
    collect(random_policy(), ContinuousActionVecMockEnv, 50, 200, sync=value == "yes")


def collector_class(name):
    collect(random_policy(), ContinuousActionVecMockEnv, 50, 200, collector_class=CLASSES[name])


def update_policy(name, sync):
    policy = CountingPolicy()

    def update(collector):
        policy.weight.data += 1
        collector.update_policy_weights_()

    batches = collect(
        policy,
        CountingEnv,
        50,
        300,
        after_first=update,
        nodes=1 if name == "async" else NODES,  # of several, one may send what it has collected before the update
        sync=sync == "yes",
        collector_class=CLASSES[name],
    )
    assert (batches[0]["action"] == 1).all()
    assert (batches[-1]["action"] == 2).all()


SCENARIOS = {
    "basic": basic,
    "synchronous": synchronous,
    "collector_class": collector_class,
    "update_policy": update_policy,
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](*sys.argv[2:])
    print("done on", torch.distributed.rpc.__name__, flush=True)
