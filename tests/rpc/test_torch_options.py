"""The options of torch's backend, accepted and checked as torch does."""

import copy
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc

from telegrad.options import RpcBackendOptions, as_options
from telegrad.rpc.options import TensorPipeRpcBackendOptions


def test_attributes_match_torch() -> None:
    ours, theirs = TensorPipeRpcBackendOptions(), torch_rpc.TensorPipeRpcBackendOptions()
    assert isinstance(ours, RpcBackendOptions)
    for name in ("num_worker_threads", "rpc_timeout", "init_method", "device_maps", "devices"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    "wrong",
    [
        {"rpc_timeout": -1},
        {"rpc_timeout": timedelta(seconds=1)},
        {"rpc_timeout": "soon"},
        {"num_worker_threads": 0},
        {"_transports": ["zzz"]},
        {"_channels": ["zzz"]},
        {"devices": ["cpu"]},
        {"device_maps": {"w1": {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}}},
    ],
    ids=lambda w: next(iter(w)),
)
def test_values_that_torch_rejects_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception) as theirs:
        torch_rpc.TensorPipeRpcBackendOptions(**wrong)
    with pytest.raises(type(theirs.value)) as ours:
        TensorPipeRpcBackendOptions(**wrong)
    assert str(ours.value).split(".")[0] == str(theirs.value).split(".")[0]


def test_workarounds_for_tensorpipe_are_accepted() -> None:
    TensorPipeRpcBackendOptions(_transports=["uv", "shm"], _channels=["mpt_uv", "basic", "cuda_ipc"])
    TensorPipeRpcBackendOptions(_transports=None, _channels=[])


def test_device_maps_are_one_to_one_and_grow() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"w1": {"cpu": "cpu"}})
    options.set_device_map("w1", {0: "cuda:1"})
    options.set_device_map("w2", {torch.device("cuda", 0): 0})
    cuda = [torch.device("cuda", i) for i in range(3)]
    cpu = torch.device("cpu")
    assert options.device_maps == {"w1": {cpu: cpu, cuda[0]: cuda[1]}, "w2": {cuda[0]: cuda[0]}}
    with pytest.raises(ValueError, match=r"1-to-1 mapping, trying to map cuda:0 to cuda:2 and cuda:1"):
        options.set_device_map("w1", {0: 2})
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
        options.set_device_map("w3", {0: 2, 1: 2})


def test_devices_are_cuda() -> None:
    options = TensorPipeRpcBackendOptions()
    options.set_devices([0, "cuda:1"])
    assert options.devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match=r"`set_devices` expect a list of CUDA devices, but got device type cpu\."):
        options.set_devices(["cpu"])


def test_attributes_can_be_set_and_are_copied() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"w1": {0: 1}})
    options.rpc_timeout = 7
    options.init_method += "x"
    options.num_worker_threads = 5
    for twin in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert vars(twin) == vars(options)
    ours = as_options(options)
    assert (ours.rpc_timeout, ours.init_method, ours.num_worker_threads) == (7, "env://x", 5)


def test_derived_classes_may_call_either_constructor() -> None:
    class Derived(RpcBackendOptions):
        def __init__(self, init_method: str) -> None:
            RpcBackendOptions.__init__(self)
            self.init_method = init_method

    assert Derived("file:///x").rpc_timeout == 60
