"""Device maps are checked at the rendezvous, as torch checks them."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.rpc.backend_registry import _validate_device_maps

from telegrad.errors import DeviceNotMapped
from telegrad.group.device_maps import Devices, check
from telegrad.rpc import TensorPipeRpcBackendOptions, Worker
from telegrad.serialize.torch_types import CPU_ONLY
from telegrad.testing import cluster

C0, C1, CPU = "cuda:0", "cuda:1", "cpu"


@pytest.mark.parametrize(
    "members",
    [
        {"a": Devices(2, [C0, C0], {})},
        {"a": Devices(1, [C1], {})},
        {"a": Devices(2, [], {"nope": {C0: C0}})},
        {"a": Devices(2, [], {"b": {C0: C0, C1: C0}}), "b": Devices(2, [], {})},
        {"a": Devices(2, [C1], {"b": {C0: C0}}), "b": Devices(2, [], {})},
        {"a": Devices(1, [], {"b": {C1: C0}}), "b": Devices(2, [], {})},
        {"a": Devices(2, [], {"b": {C0: C0}}), "b": Devices(2, [C1], {})},
        {"a": Devices(2, [], {"b": {C0: C1}}), "b": Devices(1, [], {})},
        {"a": Devices(0, [], {"b": {CPU: CPU}}), "b": Devices(0, [], {})},
        {"a": Devices(2, [C0, C1], {"b": {C0: C1, C1: C0}}), "b": Devices(2, [C0, C1], {"a": {CPU: CPU}})},
    ],
)
@pytest.mark.parametrize("static", [True, False])
def test_maps_that_torch_rejects_are_rejected(members: dict[str, Devices], static: bool) -> None:
    theirs = error_of(
        lambda: _validate_device_maps(  # type: ignore[no-untyped-call]
            list(members),
            {name: d.cuda for name, d in members.items()},
            {name: {to: as_devices(m) for to, m in d.maps.items()} for name, d in members.items()},
            {name: [torch.device(x) for x in d.own] for name, d in members.items()},
            static,
        )
    )
    assert error_of(lambda: check(members, static)) == theirs


def as_devices(devices: dict[str, str]) -> dict[torch.device, torch.device]:
    return {torch.device(here): torch.device(there) for here, there in devices.items()}


def error_of(checking: Any) -> str:
    """Return the first line of its error."""
    try:
        checking()
    except ValueError as e:
        return str(e).partition("\n")[0]
    return ""


def test_an_unknown_worker_fails_every_member_of_a_static_group() -> None:
    store = dist.HashStore()
    options = [TensorPipeRpcBackendOptions(device_maps=maps) for maps in ({"nope": {"cpu": "cpu"}}, {})]
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(Worker, f"w{rank}", rank, 2, options[rank], store=store) for rank in range(2)]
        for one in joining:
            with pytest.raises(ValueError, match=r"Node w0 has invalid target node names in its device maps"):
                one.result()


def test_a_dynamic_group_allows_unknown_workers(caplog: pytest.LogCaptureFixture) -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"later": {"cpu": "cpu"}})
    Worker("a", options=options, store=dist.HashStore()).shutdown()
    assert "device maps have no effect yet" in caplog.text
    options = TensorPipeRpcBackendOptions(devices=[torch.cuda.device_count()])
    with pytest.raises(ValueError, match="Node a has devices with invalid indices"):
        Worker("a", options=options, store=dist.HashStore())


class OnADevice:
    """Fake tensor on a device that this machine need not have."""

    def __reduce__(self) -> Any:
        raise DeviceNotMapped(CPU_ONLY.format("cuda:0"))


def test_a_tensor_on_another_device_names_the_destination() -> None:
    with cluster(2) as w:
        expected = re.escape("Request device mapping is not available for destination w1")
        with pytest.raises(DeviceNotMapped, match=expected) as raised:
            w[0].rpc_sync("w1", id, (OnADevice(),))
        assert "only supports CPU tensors by default" in str(raised.value)
        assert "cuda:0 (at args[0], of type" in str(raised.value)
        with pytest.raises(DeviceNotMapped, match="Request device mapping is not available for destination w0"):
            w[0].rpc_sync("w1", OnADevice)
